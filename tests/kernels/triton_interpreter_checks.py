"""Runs in a process with TRITON_INTERPRET=1 (see `test_triton_kernels`); one printed line a check.

python -m kernels.triton_interpreter_checks few|all
"""

import itertools
import sys
from unittest.mock import patch

import torch

from kernels import fused_checks, small_kernel_checks, unchanged
from kernels.paged_cases import dense_attention, make_case
from ostinato.kernels.attention import choice, get_backend, gpu_ops
from ostinato.kernels.gpu import Gpu
from ostinato.kernels.linear import ops as linear_ops
from ostinato.kernels.linear import products
from ostinato.kernels.linear.rules import gemv_tile
from ostinato.kernels.linear.tiles import GemvTile, MatrixShape, SkinnyTile
from ostinato.kernels.linear.weight import Weight
from ostinato.kernels.norms import triton_rows

TRITON = get_backend("triton", "cpu")

PROJECTIONS = (
    {"norm": True},
    {"gated": True, "bias": True},
    {"norm": True, "gated": True},
    {"bias": True, "residual": True},
)
FLAGS = ({"gated": True, "bias": True}, {"bias": True}, {})
SKINNY = (
    SkinnyTile(16, 8, 32, 4, 2),
    SkinnyTile(16, 32, 16, 4, 2),
    SkinnyTile(16, 16, 16, 4, 2, parts=2),
    SkinnyTile(16, 32, 32, 4, 2, parts=4),
)
ALL = sys.argv[1:] == ["all"]


def check_views_of_a_fused_projection() -> None:
    case = make_case([(20, 5)], num_heads=4, num_kv_heads=2, head_dim=16)
    fused = torch.cat([case.q.flatten(1), case.k.flatten(1), case.v.flatten(1)], dim=1)
    q, k, v = (part.unflatten(1, (-1, 16)) for part in fused.split([4 * 16, 2 * 16, 2 * 16], dim=1))
    assert not q.is_contiguous()
    k_cache, v_cache = case.k_cache.clone(), case.v_cache.clone()
    TRITON.write_kv(k, v, k_cache, v_cache, case.batch)
    out = TRITON.attend_eager(q, k_cache, v_cache, case.batch, scale=case.scale, lengths=case.lengths)
    torch.testing.assert_close(out.double(), dense_attention(case), atol=2e-5, rtol=2e-5)


def check_fused_attention() -> None:
    """Norm or none, windows within a part and over several, heads of any size and group."""
    decode = [(40, 1), (1, 1), (33, 1), (70, 1)]
    splits = [(300, 1), (64, 1), (257, 1), (7, 1)]
    mixed = [(40, 1), (21, 19), (9, 0), (7, 7)]

    def check(
        requests: list[tuple[int, int]],
        heads: tuple[int, int, int],
        dtype: torch.dtype = torch.float32,
        *,
        norm: bool = True,
        window: int | None = None,
    ) -> None:
        longest = max(length for _, length in requests)
        options = {"norm": norm, "max_query_len": longest, "window": window}
        fused_checks.check_attend_qkv("cpu", dtype, requests, heads, **options)

    check(decode, (6, 2, 24))
    check(decode, (4, 4, 16), torch.float16, norm=False, window=9)
    check(decode, (7, 1, 80), window=9)
    check(splits, (6, 2, 24))
    check(splits, (4, 2, 16), norm=False, window=70)
    check(mixed, (6, 2, 24))
    check(mixed, (4, 4, 16), norm=False, window=9)
    if ALL:
        check(decode, (2, 1, 128), norm=False)
        check(decode, (4, 2, 16), torch.float16)
        check(splits, (2, 2, 256), window=200)
        check(mixed, (7, 1, 80), window=9)


def check_products() -> None:
    """Odd shapes: no multiples of a tile, parts without work; more rows than tokens and the other way."""
    for size, ways in (((13, 40), FLAGS), ((16, 128), FLAGS if ALL else FLAGS[2:])):
        for tile, flags in itertools.product(SKINNY, ways):
            if tile.parts == 1 or not flags.get("gated"):
                fused_checks.check_product("cpu", torch.float32, (19, *size), tile, **flags)


def check_layers_by_choice() -> None:
    """A product in parts, added by whoever reads it; a fused kernel where nothing is to be fused."""
    weight, bias, norm = torch.randn(24, 64) / 8, torch.randn(24), torch.randn(24)
    for tile, num_tokens in (
        (SkinnyTile(16, 16, 16, 4, 2, parts=2), 5),
        (SkinnyTile(16, 16, 32, 4, 2), 5),
        (GemvTile(8, 32, 4), 1),
    ):
        x, residual = torch.randn(num_tokens, 64), torch.randn(num_tokens, 24)
        with (
            patch.object(products, "tile_for", lambda *_, tile=tile, **__: tile),
            patch.object(linear_ops, "choose_for", lambda *_, tile=tile: tile),
        ):
            product = products.linear_in_parts(x, Weight(weight), bias)
            rows = (num_tokens, 24)
            assert product.shape == ((2, *rows) if getattr(tile, "parts", 1) > 1 else rows)
            total = residual.clone()
            added = triton_rows.add_rms_norm(product, total, norm, 1e-5)
            wanted = torch.nn.functional.linear(x, weight, bias)
            torch.testing.assert_close(products.linear(x, Weight(weight), bias), wanted, atol=1e-5, rtol=1e-5)
            torch.testing.assert_close(total, wanted + residual, atol=1e-5, rtol=1e-5)
            expected = torch.nn.functional.rms_norm(total, (24,), norm, 1e-5)
            torch.testing.assert_close(added, expected, atol=1e-5, rtol=1e-5)
            if getattr(tile, "parts", 1) == 1:
                gate, up = wanted.chunk(2, dim=-1)
                gated = products.gated_linear(x, Weight(weight), bias)
                torch.testing.assert_close(gated, torch.nn.functional.silu(gate) * up, atol=1e-5, rtol=1e-5)


def check_projections() -> None:
    for shape in ((1, 13, 40), (1, 16, 128)):
        for flags in PROJECTIONS:
            fused_checks.check_projection("cpu", torch.float32, shape, GemvTile(2, 32, 4), **flags)
    tile = gemv_tile(MatrixShape(24, 5000), Gpu((9, 0), 132))
    fused_checks.check_projection("cpu", torch.float16, (1, 24, 5000), tile, norm=True, gated=True)


def check_rows() -> None:
    fused_checks.check_rows("cpu", torch.float32, 3, 40)
    fused_checks.check_rows("cpu", torch.float16, 2, 1500)
    fused_checks.check_scaled_rows("cpu", torch.float32, 3, 64)
    fused_checks.check_scaled_rows("cpu", torch.float16, 5, 320)


def check_ops_are_declared_truthfully() -> None:
    """Schemas: what is changed is said to be changed, and nothing else is."""
    tests = ("test_schema", "test_faketensor")
    case = make_case([(20, 1)])
    b = case.batch
    slots = (b.page_table, b.token_rows, b.positions)
    opcheck, ops = torch.library.opcheck, torch.ops.ostinato
    lengths = (b.req_rows, b.seq_lens, b.query_starts, b.query_lens)
    for max_context in (32, 512):
        queries = (case.q, case.k_cache, case.v_cache, *slots, *lengths, case.scale, 0, 1, max_context)
        opcheck(ops.attend_queries.default, queries, test_utils=tests)
    rows, rotary, weight = torch.randn(1, 8 * 16), torch.randn(32, 16), torch.randn(16)
    prepared = (rows, rotary, weight, weight, 1e-5, case.k_cache, case.v_cache, *slots)
    opcheck(ops.prepare_heads.default, (*prepared, 4), test_utils=tests)
    opcheck(ops.attend_tokens.default, (*prepared, None, 4, case.scale, 0, 32), test_utils=tests)
    x, matrix = torch.randn(1, 16), torch.randn(8, 16)
    projection = (x, matrix, None, weight, 1e-5, True, torch.randn(1, 4), torch.float32)
    with patch.object(linear_ops, "choose_for", lambda *_: GemvTile(2, 16, 4)):
        opcheck(ops.project_few_tokens.default, projection, test_utils=tests)
        opcheck(ops.multiply_into.default, (x, matrix, torch.empty(1, 8)), test_utils=tests)
    for parts in (1, 2):
        with patch.object(
            linear_ops, "choose_for", lambda *_, parts=parts: SkinnyTile(16, 8, 16, 4, 2, parts)
        ):
            opcheck(ops.multiply.default, (x, matrix, None, False, torch.float32), test_utils=tests)
    opcheck(ops.rms_norm.default, (x, weight, 1e-5), test_utils=tests)
    opcheck(ops.add_rms_norm.default, (x, x.clone(), weight, 1e-5), test_utils=tests)
    opcheck(ops.silu_mul.default, (x,), test_utils=tests)
    opcheck(ops.scale_rows.default, (torch.randn(3, 128), torch.randn(128)), test_utils=tests)
    check_sampling_ops_are_declared_truthfully(tests)


def check_sampling_ops_are_declared_truthfully(tests: tuple[str, ...]) -> None:
    opcheck, ops = torch.library.opcheck, torch.ops.ostinato
    plain = small_kernel_checks.PlainCase.random(3, 40, 1, torch.float32)
    logits, rows, asked = plain.logits, plain.rows, plain.settings
    opcheck(ops.best_of_blocks.default, (logits, rows, *asked), test_utils=tests)
    opcheck(ops.plain_tokens.default, (logits, rows, *asked), test_utils=tests)
    lines = small_kernel_checks.lines_of(6, 3, "cpu")
    values, tokens = torch.rand(3, 2), torch.ones(3, 2, dtype=torch.int32)
    opcheck(ops.return_best.default, (rows, values, tokens, 40, *lines), test_utils=tests)


def check_small_kernels() -> None:
    small_kernel_checks.check_all("cpu")


CHECKS = (
    check_small_kernels,
    check_views_of_a_fused_projection,
    check_fused_attention,
    check_projections,
    check_products,
    check_layers_by_choice,
    check_rows,
    check_ops_are_declared_truthfully,
)


def main() -> None:
    assert gpu_ops.INTERPRETED
    for each in CHECKS[: 1 if unchanged.is_brief() else None]:
        each()
        print(each.__name__)
    print("all checks passed")


if __name__ == "__main__":
    torch.set_num_threads(1)
    # A few splits show what many do.
    with patch.object(choice, "_PROGRAMS_WANTED", 48):
        main()
