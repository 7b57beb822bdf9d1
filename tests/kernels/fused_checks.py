"""Checks of the fused kernels against plain torch in float64, for the interpreter and for a GPU."""

import dataclasses
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn import functional

from kernels.paged_cases import Case, dense_attention, make_case, written_caches
from ostinato.kernels.attention import AttentionBatch, HeadPreparation, gpu_ops, torch_reference
from ostinato.kernels.linear import few_tokens
from ostinato.kernels.linear import ops as linear_ops
from ostinato.kernels.linear.cuda_few_tokens import FusedLayer
from ostinato.kernels.linear.tiles import SkinnyTile, Tile, WideTile
from ostinato.kernels.norms import triton_rows

TOLERANCE = {torch.float32: 3e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
"""Absolute and relative, for values of order one."""

Heads = tuple[int, int, int]


def _random(*shape: int, dtype: torch.dtype, device: torch.device | str, seed: int) -> Tensor:
    generator = torch.Generator(device).manual_seed(seed)
    return torch.randn(*shape, generator=generator, device=device).to(dtype)


def _assert_close(out: Tensor, wanted: Tensor, tolerance: float) -> None:
    torch.testing.assert_close(out.double(), wanted.double(), atol=tolerance, rtol=tolerance)


def check_rows(device: torch.device | str, dtype: torch.dtype, num_tokens: int, width: int) -> None:
    """Norm, norm of a sum, and gate."""
    tolerance = TOLERANCE[dtype]
    x, residual = (_random(num_tokens, width, dtype=dtype, device=device, seed=seed) for seed in (1, 2))
    weight = _random(width, dtype=dtype, device=device, seed=3)

    def norm(value: Tensor) -> Tensor:
        return functional.rms_norm(value.double(), (width,), weight.double(), 1e-5)

    _assert_close(triton_rows.rms_norm(x, weight, 1e-5), norm(x), tolerance)
    total, summed = residual.clone(), residual.clone()
    normed = triton_rows.add_rms_norm(x, total, weight, 1e-5)
    assert torch.equal(total, x + residual)
    _assert_close(normed, norm(total), tolerance)
    parts = torch.stack([x.float() / 2, residual.float(), x.float() / 2 - residual.float()])
    normed = triton_rows.add_rms_norm(parts, summed, weight, 1e-5)
    _assert_close(summed, total, tolerance)
    _assert_close(normed, norm(summed), tolerance)
    gate_up = _random(num_tokens, 2 * width, dtype=dtype, device=device, seed=4)
    gate, up = gate_up.double().chunk(2, dim=-1)
    triton_rows.silu_mul(gate_up)
    _assert_close(gate_up[:, :width], functional.silu(gate) * up, tolerance)
    assert torch.equal(gate_up[:, width:].double(), up), "the second half stays"


def check_scaled_rows(device: torch.device | str, dtype: torch.dtype, num_tokens: int, width: int) -> None:
    """Rows times a weight, and the squares of 64 columns each."""
    x = _random(num_tokens, width, dtype=dtype, device=device, seed=1)
    weight = _random(width, dtype=dtype, device=device, seed=3)
    scaled, squares = triton_rows.scale_rows(x, weight)
    _assert_close(scaled, x.double() * weight.double(), TOLERANCE[dtype])
    assert squares.shape == (width // 64, num_tokens)
    assert squares.dtype == torch.float32
    _assert_close(squares, x.double().square().unflatten(1, (-1, 64)).sum(2).t(), 1e-4)


def check_projection(
    device: torch.device | str,
    dtype: torch.dtype,
    shape: tuple[int, int, int],
    tile: Tile,
    *,
    norm: bool = False,
    gated: bool = False,
    bias: bool = False,
    residual: bool = False,
) -> None:
    """`project_few_tokens` for shape (tokens, out, in) by the kernel of `tile`."""
    num_tokens, out_features, in_features = shape
    options = {"dtype": dtype, "device": device}
    x = _random(num_tokens, in_features, **options, seed=1)
    weight = _random(out_features * (2 if gated else 1), in_features, **options, seed=2) * in_features**-0.5
    norm_weight = _random(in_features, **options, seed=3) if norm else None
    biases = _random(weight.size(0), **options, seed=4) if bias else None
    rest = _random(num_tokens, out_features, **options, seed=5) if residual else None
    operands = (x, weight, biases, norm_weight, 1e-5, gated, rest)
    with patch.object(linear_ops, "choose_for", lambda *_: tile):
        out = linear_ops.project_few_tokens(FusedLayer(*operands, torch.float32))
        rounded = linear_ops.project_few_tokens(FusedLayer(*operands, dtype))
    wanted = few_tokens.reference(
        *(None if t is None else t.double() for t in (x, weight, biases)),
        norm_weight=None if norm_weight is None else norm_weight.double(),
        eps=1e-5,
        gated=gated,
        residual=None if rest is None else rest.double(),
    )
    # Products are exact and sums float32 for one token; x times the norm's weight is rounded for several.
    _assert_close(out, wanted, 1e-4 if num_tokens == 1 or dtype == torch.float32 else TOLERANCE[dtype])
    assert rounded.dtype == dtype
    assert torch.equal(rounded, out.to(dtype))


def check_product(
    device: torch.device | str,
    dtype: torch.dtype,
    shape: tuple[int, int, int],
    tile: SkinnyTile | WideTile,
    *,
    gated: bool = False,
    bias: bool = False,
) -> None:
    """`multiply` for shape (tokens, out, in)."""
    num_tokens, out_features, in_features = shape
    options = {"dtype": dtype, "device": device}
    x = _random(num_tokens, in_features, **options, seed=1)
    weight = _random(out_features * (2 if gated else 1), in_features, **options, seed=2) * in_features**-0.5
    biases = _random(weight.size(0), **options, seed=4) if bias else None
    parts = tile.parts if isinstance(tile, SkinnyTile) else 1
    with patch.object(linear_ops, "choose_for", lambda *_: tile):
        out = linear_ops.multiply(x, weight, biases, gated, torch.float32)
        rounded = linear_ops.multiply(x, weight, biases, gated, dtype)
        if not gated and not bias and parts == 1:
            into = torch.full_like(out, float("nan"))
            linear_ops.multiply_into(x, weight, into)
            assert torch.equal(into, out)
    if parts > 1:
        assert out.shape == (parts, num_tokens, out_features)
        assert torch.equal(rounded, out), "the same bits each time"
        out, rounded = out.sum(0), rounded.sum(0).to(dtype)
    wanted = few_tokens.reference(
        *(None if t is None else t.double() for t in (x, weight, biases)), gated=gated
    )
    _assert_close(out, wanted, 1e-4)
    assert torch.equal(rounded, out.to(dtype))


def _in_parts(rows: Tensor, count: int) -> Tensor:
    """Parts of different sizes whose sum the rows are, exactly."""
    shares = [rows.float() * 2.0**-at for at in range(1, count)]
    return torch.stack([*shares, rows.float() * 2.0 ** (1 - count)])


@dataclasses.dataclass(frozen=True)
class PlacedStep:
    """Requests with places for so many tokens each, two of them padding; ready to attend."""

    case: Case
    """Of the tokens alone, one after another."""
    used: list[int]
    """Their places."""
    batch: AttentionBatch
    rows: Tensor
    """In the places."""
    preparation: HeadPreparation
    k_cache: Tensor
    v_cache: Tensor

    def attend(self, window: int | None = None, parts: int = 1) -> Tensor:
        """Attention of all places; the caches are written."""
        return gpu_ops.attend_qkv(
            self.rows if parts == 1 else _in_parts(self.rows, parts),
            self.preparation,
            self.k_cache,
            self.v_cache,
            self.batch,
            num_heads=self.case.q.size(1),
            scale=self.case.scale,
            sliding_window=window,
        )


def equal_places_step(
    device: torch.device | str,
    requests: list[tuple[int, int]],
    places: int,
    heads: Heads,
    dtype: torch.dtype = torch.bfloat16,
    *,
    norm: bool = False,
) -> PlacedStep:
    """Requests of (context, tokens)."""
    num_heads, num_kv_heads, head_dim = heads
    case = make_case(
        requests,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        padded_requests=2,
        slack_context=5,
        dtype=dtype,
        device=device,
        poison=float("nan"),
    )
    used = [r * places + i for r, (_, count) in enumerate(requests) for i in range(count)]
    num_places = (len(requests) + 2) * places

    def placed(values: Tensor) -> Tensor:
        found = values.new_zeros(num_places)
        found[used] = values
        return found

    batch = dataclasses.replace(
        case.batch,
        token_rows=placed(case.batch.token_rows),
        positions=placed(case.batch.positions),
        query_starts=torch.arange(0, num_places, places, dtype=torch.int32, device=device),
        max_query_len=places,
        equal_places=True,
    )
    width = (num_heads + 2 * num_kv_heads) * head_dim
    rows = _random(num_places, width, dtype=dtype, device=device, seed=9)
    preparation = _preparation(case, dtype, head_dim, norm=norm)
    operands = (rows[used], preparation, num_heads, num_kv_heads, case.batch.positions)
    q, k, v = torch_reference.prepare_heads(*operands)
    case = dataclasses.replace(case, q=q, k=k, v=v)
    return PlacedStep(case, used, batch, rows, preparation, case.k_cache.clone(), case.v_cache.clone())


def check_equal_places(
    device: torch.device | str,
    dtype: torch.dtype,
    requests: list[tuple[int, int]],
    places: int,
    heads: Heads,
    *,
    norm: bool,
    window: int | None = None,
    parts: int = 1,
) -> None:
    """Attention and caches of such a step, against dense attention."""
    step = equal_places_step(device, requests, places, heads, dtype, norm=norm)
    out = step.attend(window, parts)
    assert out.isfinite().all()
    _assert_close(out[step.used], dense_attention(step.case, window), TOLERANCE[dtype])
    for cache, wanted in zip((step.k_cache, step.v_cache), written_caches(step.case), strict=True):
        _assert_close(cache[1:], wanted[1:], TOLERANCE[dtype])


def _preparation(case: Case, dtype: torch.dtype, head_dim: int, *, norm: bool) -> HeadPreparation:
    device = case.q.device
    angles = _random(case.batch.max_context, head_dim // 2, dtype=torch.float32, device=device, seed=10)
    rotary = torch.cat([angles.cos(), angles.sin()], dim=1)
    if not norm:
        return HeadPreparation(rotary)
    weights = (1 + _random(head_dim, dtype=dtype, device=device, seed=seed) / 4 for seed in (11, 12))
    return HeadPreparation(rotary, *weights, eps=1e-5)


def check_attend_qkv(
    device: torch.device | str,
    dtype: torch.dtype,
    requests: list[tuple[int, int]],
    heads: Heads,
    *,
    norm: bool,
    max_query_len: int,
    window: int | None = None,
    parts: int = 1,
    shared_pages: int | None = None,
) -> None:
    """From QKV rows, perhaps in parts, to attention and caches, against the reference and dense attention;
    that of the last tokens alone, too."""
    num_heads, num_kv_heads, head_dim = heads
    case = make_case(
        requests,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        padded_tokens=3,
        padded_requests=2,
        slack_context=5,
        max_query_len=max_query_len,
        dtype=dtype,
        device=device,
        poison=float("nan"),
        shared_pages=shared_pages,
    )
    num_tokens = case.q.size(0)
    rows = _random(num_tokens, (num_heads + 2 * num_kv_heads) * head_dim, dtype=dtype, device=device, seed=9)
    preparation = _preparation(case, dtype, head_dim, norm=norm)
    q, k, v = torch_reference.prepare_heads(rows, preparation, num_heads, num_kv_heads, case.batch.positions)
    case = dataclasses.replace(case, q=q, k=k, v=v)
    k_cache, v_cache = case.k_cache.clone(), case.v_cache.clone()
    out = gpu_ops.attend_qkv(
        rows if parts == 1 else _in_parts(rows, parts),
        preparation,
        k_cache,
        v_cache,
        case.batch,
        num_heads=num_heads,
        scale=case.scale,
        sliding_window=window,
    )
    assert out.isfinite().all()
    tolerance = TOLERANCE[dtype]
    _assert_close(out[: case.num_real_tokens], dense_attention(case, window), tolerance)
    for cache, wanted in zip((k_cache, v_cache), written_caches(case), strict=True):
        _assert_close(cache[1:], wanted[1:], tolerance)
    if max_query_len > 1:
        _check_last_tokens(case, rows, preparation, window)


def _check_last_tokens(case: Case, rows: Tensor, preparation: HeadPreparation, window: int | None) -> None:
    """As a last layer attends: all is stored, then the last tokens attend from their rows."""
    caches, num_heads = (case.k_cache.clone(), case.v_cache.clone()), case.q.size(1)
    gpu_ops.store_qkv(rows, preparation, *caches, case.batch, num_heads=num_heads)
    places, last = case.batch.last_places(), case.batch.of_last_tokens()
    of_last = rows.index_select(0, places)
    options = {"num_heads": num_heads, "scale": case.scale, "sliding_window": window}
    out = gpu_ops.attend_qkv(of_last, preparation, *caches, last, **options)
    assert out.isfinite().all()
    there, tolerance = case.batch.query_lens > 0, TOLERANCE[rows.dtype]
    wanted = dense_attention(case, window)[places[there].long()]
    _assert_close(out[there], wanted, tolerance)
    for cache, kept in zip(caches, written_caches(case), strict=True):
        _assert_close(cache[1:], kept[1:], tolerance)
