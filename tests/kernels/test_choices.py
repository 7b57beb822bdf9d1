"""Tiles are chosen by shape alone, and steps of one class run the same compiled kernels."""

from collections import defaultdict

import pytest
import torch

from ostinato.kernels import rows
from ostinato.kernels.attention.decode_tiles import MAX_SPLITS, decode_tile, num_splits_of
from ostinato.kernels.linear import few_tokens, products, tiles
from ostinato.kernels.linear.tiles import MatrixShape
from ostinato.kernels.variants import kernel_class

MEASURED = sorted({*tiles._GEMV, *tiles._RESIDENT, *tiles._SKINNY})


def is_power_of_two(value: int) -> bool:
    return value > 0 and value & (value - 1) == 0


@pytest.mark.parametrize("shape", [*MEASURED, MatrixShape(49, 577), MatrixShape(5, 40_000)], ids=str)
def test_tiles_are_what_triton_takes(shape):
    gemv = tiles.gemv_tile(shape)
    assert is_power_of_two(gemv.rows)
    assert is_power_of_two(gemv.block)
    if resident := tiles.resident_tile(shape):
        assert all(is_power_of_two(value) for value in vars(resident).values())
        assert shape.out_features % resident.rows == 0
    for num_tokens in tiles.SKINNY_TOKENS:
        if skinny := tiles.skinny_tile(shape, num_tokens):
            assert is_power_of_two(skinny.tokens)
            assert is_power_of_two(skinny.rows)
            assert is_power_of_two(skinny.block)
    assert tiles.skinny_tile(shape, tiles.SKINNY_TOKENS[-1] + 1) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("num_kv_heads", [1, 2, 8, 32])
def test_one_warm_up_serves_a_whole_class(dtype, num_kv_heads):
    """Everything that is compiled in is equal for all steps of a class."""
    compiled = defaultdict(set)
    for num_tokens in range(1, 600):
        attention = decode_tile(dtype, num_tokens), num_splits_of(num_tokens, num_kv_heads) > 1
        linear = (
            min(num_tokens, 2) if num_tokens <= tiles.RESIDENT_TOKENS else None,
            *(tiles.skinny_tile(shape, num_tokens) for shape in MEASURED),
        )
        compiled[kernel_class(num_tokens, num_kv_heads, dtype, is_decode=True)].add((attention, linear))
        compiled["mixed", kernel_class(num_tokens, num_kv_heads, dtype, is_decode=False)].add(linear)
    assert all(len(variants) == 1 for variants in compiled.values())
    assert len(compiled) <= 16


def test_splits_fill_a_gpu_and_no_more():
    for num_tokens in (1, 2, 7, 16, 300):
        for num_kv_heads in (1, 2, 8, 32):
            splits, programs = num_splits_of(num_tokens, num_kv_heads), num_tokens * num_kv_heads
            assert 1 <= splits <= MAX_SPLITS
            assert splits == 1 or splits * programs <= 256


def test_a_model_without_measured_tiles_gets_the_kernels_that_serve_any_shape():
    measured = [MatrixShape(4096, 1024), MatrixShape(1024, 3072)]
    assert few_tokens.most_tokens(measured, torch.bfloat16) == tiles.RESIDENT_TOKENS
    assert few_tokens.most_tokens([*measured, MatrixShape(7, 9)], torch.bfloat16) == 1
    assert few_tokens.most_tokens(measured, torch.float16) == 1
    assert few_tokens.most_tokens(measured, torch.float32) == 0


def test_on_a_cpu_everything_is_plain_torch():
    """At shapes that have tiles on a GPU."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    x, weight, norm, residual = random(5, 1024), random(64, 1024) / 32, random(1024), random(5, 1024)
    assert torch.equal(products.linear(x, weight), x @ weight.T)
    gate, up = (x @ weight.T).chunk(2, dim=-1)
    assert torch.equal(products.gated_linear(x, weight), torch.nn.functional.silu(gate) * up)
    out = torch.empty(5, 64)
    assert products.float_linear(x, weight, out) is out
    assert torch.equal(products.float_linear(x, weight), out)
    normed, total = rows.add_rms_norm(x, residual, norm, 1e-6)
    assert torch.equal(total, residual + x)
    assert torch.equal(normed, rows.rms_norm(total, norm, 1e-6))
    projected = few_tokens.project(x, weight, norm_weight=norm, eps=1e-6, gated=True)
    torch.testing.assert_close(projected, products.gated_linear(rows.rms_norm(x, norm, 1e-6), weight))
    assert torch.equal(rows.argmax(x), x.argmax(-1))
