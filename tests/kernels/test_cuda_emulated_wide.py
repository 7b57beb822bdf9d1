"""`wide.cu` and what launches it, without a GPU: right in the emulator."""

import random

import pytest
import torch

pytest.importorskip("triton")

from kernels.cuda_emulator.emulated import MAY_SKIP, MOST_SHARED_BYTES, Emulator
from kernels.emulated_checks import Form, check_scaled, check_wide, random_bf16
from kernels.fast_cases import slow_but_for
from ostinato.kernels.linear import cuda_wide, scaled_rows
from ostinato.kernels.linear import ops as linear_ops
from ostinato.kernels.linear.tiles import MatrixShape, WideTile

pytestmark = pytest.mark.skipif(MAY_SKIP, reason="needs g++")


@pytest.fixture(scope="module")
def emulator(tmp_path_factory):
    return Emulator(tmp_path_factory.mktemp("kernels"))


WIDE = {
    "all in one program": ((64, 256), WideTile(32, 64, 64, 2, 3), Form(bias=True), (1, 20, 32)),
    "tokens in several programs": ((128, 192), WideTile(16, 64, 64, 3, 2), Form(), (17, 40)),
    "two groups of warps": ((256, 512), WideTile(64, 128, 128, 2, 4), Form(bias=True), (61,)),
    "programs share columns": ((64, 512), WideTile(32, 64, 64, 2, 2, slices=4), Form(bias=True), (3, 9, 31)),
    "as many as there can be": ((64, 1024), WideTile(64, 64, 64, 2, 2, slices=8), Form(), (61,)),
    "40 tokens": ((64, 512), WideTile(40, 64, 64, 2, 3), Form(bias=True), (33, 40, 75)),
    "48 tokens, gated": ((64, 256, True), WideTile(48, 32, 64, 2, 2), Form(bias=True), (41, 48)),
    "40 tokens, four share": ((128, 512), WideTile(40, 128, 64, 2, 2, slices=4), Form(), (5, 38, 40)),
    "two share": ((128, 1024), WideTile(64, 64, 128, 2, 3, slices=2), Form(dtype=torch.float32), (50, 70)),
    "gated, two groups": ((128, 256, True), WideTile(64, 64, 64, 4, 4), Form(dtype=torch.float32), (33,)),
    "gated, with all else": ((128, 512, True), WideTile(64, 64, 64, 2, 3, slices=2), Form(bias=True), (61,)),
    "adapters": ((128, 512), WideTile(32, 64, 64, 2, 2, slices=4), Form(bias=True, adapted=True), (9, 31)),
    "adapters, gated": ((128, 256, True), WideTile(64, 64, 64, 4, 4), Form(adapted=True), (33,)),
}


@pytest.mark.parametrize(
    "name",
    slow_but_for(
        WIDE,
        *("tokens in several programs", "two groups of warps", "as many as there can be"),
        *("48 tokens, gated", "40 tokens, four share", "two share", "gated, with all else", "adapters"),
    ),
)
def test_a_linear_layer_of_many_tokens_is_right(emulator, name):
    shape, tile, form, tokens = WIDE[name]
    for num_tokens in tokens:
        check_wide(emulator, MatrixShape(*shape), tile, form, num_tokens)


HALF_NORMS = {
    "one program": ((128, 256), WideTile(32, 64, 64, 2, 2), (1, 31), True),
    "128 rows": ((256, 512), WideTile(64, 128, 128, 2, 2, slices=2), (50,), False),
    "four tokens each": ((64, 1024), WideTile(32, 64, 64, 2, 2, slices=8), (29,), False),
    "several programs": ((128, 512), WideTile(64, 64, 64, 3, 2, slices=2), (60, 80), True),
    "gated": ((128, 256, True), WideTile(32, 32, 64, 2, 2), (30,), True),
    "40 tokens, shared": ((128, 512), WideTile(40, 64, 64, 2, 2, slices=4), (37, 40), True),
    "48 tokens, shared": ((64, 1024), WideTile(48, 64, 64, 2, 2, slices=2), (45,), False),
    "gated, shared": ((64, 512, True), WideTile(64, 64, 64, 2, 2, slices=4), (33, 64), False),
}


@pytest.mark.parametrize(
    "name",
    slow_but_for(
        HALF_NORMS,
        *("one program", "four tokens each", "several programs", "48 tokens, shared", "gated, shared"),
    ),
)
def test_a_norm_may_be_left_half_done(emulator, name):
    shape, tile, tokens, bias = HALF_NORMS[name]
    for num_tokens in tokens:
        check_scaled(emulator, MatrixShape(*shape), tile, num_tokens, bias=bias)


@pytest.mark.parametrize(
    "name",
    slow_but_for(("one program", "four tokens each", "gated, shared"), "one program", "gated, shared"),
)
def test_adapters_around_a_norm_that_is_half_done(emulator, name):
    shape, tile, tokens, bias = HALF_NORMS[name]
    check_scaled(emulator, MatrixShape(*shape), tile, tokens[-1], bias=bias, adapted=True)


def test_ops_around_a_norm_are_declared_truthfully(emulator, monkeypatch):
    """What is changed is said to be changed, and nothing else is."""
    monkeypatch.setattr(cuda_wide, "cuda_kernel", emulator.kernel)
    monkeypatch.setattr(linear_ops, "choose_for", lambda *_: WideTile(16, 64, 64, 2, 2))
    tests, ops = ("test_schema", "test_faketensor"), torch.ops.ostinato
    x, weight, bias, norm = (random_bf16(*size) for size in ((5, 128), (64, 128), (64,), (128,)))
    begun = scaled_rows.scale(x, norm)
    behind = (begun.scaled, begun.squares, weight, bias, 1e-5, False)
    torch.library.opcheck(ops.project_scaled.default, behind, test_utils=tests)
    before = (x, weight, bias, random_bf16(5, 64), norm[:64])
    torch.library.opcheck(ops.add_projected.default, before, test_utils=tests)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_random_linear_layers_of_many_tokens(emulator):
    chance, checked = random.Random(0), 0
    while checked < 40:
        gated, slices = chance.random() < 0.4, chance.choice([1, 2, 4, 8])
        rows = (32 if gated else 64) * chance.randint(1, 3)
        slots, box = (chance.randint(2, 4), chance.randint(2, 4)), chance.choice([64, 64, 128])
        tile = WideTile(chance.choice([16, 32, 64]), rows, box, *slots, slices)
        columns = slices * box * chance.randint(max(slots), max(slots) + 3)
        shape = MatrixShape(rows * chance.randint(1, 3), columns, gated)
        dtype = chance.choice([torch.bfloat16, torch.float32])
        if tile.fits(shape) and tile.shared_bytes(shape, norm=True) <= MOST_SHARED_BYTES:
            bias, num_tokens = chance.random() < 0.5, chance.randint(1, tile.tokens + 9)
            check_wide(emulator, shape, tile, Form(bias=bias, dtype=dtype), num_tokens)
            check_scaled(emulator, shape, tile, num_tokens, bias=bias)
            checked += 1
