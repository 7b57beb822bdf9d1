"""The Triton kernels without a GPU: right in the interpreter, and accepted by the compiler for Hopper."""

import pytest
import torch

from kernels.interpreted import assert_passes

triton = pytest.importorskip("triton")

# Triton 3.6's interpreter with NumPy 2.4: a fault of that pair, not of a kernel.

POINTERS = {torch.float32: "*fp32", torch.float16: "*fp16", torch.bfloat16: "*bf16"}


@pytest.mark.parametrize(
    "which", ["few", pytest.param("all", marks=[pytest.mark.slow, pytest.mark.timeout(300)])]
)
def test_kernels_are_right_in_the_interpreter(which):
    assert_passes("kernels.triton_interpreter_checks", which, 110 if which == "few" else 280)


def compiled(kernel, types, constants, capability=90, **options):
    """The kernel's binary for compute capability 9.0, or another."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    places = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    source = ASTSource(kernel, types | dict.fromkeys(constants, "constexpr"), constexprs=places)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options).asm["cubin"]


def pointers(dtype: torch.dtype, *names: str) -> dict[str, str]:
    return dict.fromkeys(names, POINTERS[dtype])


def compiles(kernel, types, constants, tile=None, **options):
    """Whether the kernel compiles; fields of `tile` are options of the launch or constants."""
    for name, value in vars(tile).items() if tile else ():
        (options if name in ("num_warps", "num_stages") else constants)[name] = value
    if "dependent" in kernel.arg_names:
        constants["dependent"] = True
    scalars = {name: "i32" for name in kernel.arg_names if name not in types and name not in constants}
    return compiled(kernel, {**scalars, **types}, constants, **options)


@pytest.fixture(autouse=True)
def _not_interpreted():
    if triton.knobs.runtime.interpret:
        pytest.skip("TRITON_INTERPRET is set: there is nothing to compile")


def test_linear_layers_compile_for_hopper():
    from ostinato.kernels.linear.tiles import GemvTile, SkinnyTile
    from ostinato.kernels.linear.triton_gemv import _gemv
    from ostinato.kernels.linear.triton_skinny import _skinny

    sizes = {"out_features": 3072, "in_features": 1024, "gated": True, "has_bias": False}
    flags = {"norm": True, "has_residual": False}
    operands = pointers(torch.bfloat16, "x", "weight", "bias", "out")
    norms = {**pointers(torch.bfloat16, "norm_weight", "residual"), "eps": "fp32"}
    of_gemv = operands | norms | {"slots": "*i32", "deltas": "*fp32"}
    for adapted in (False, True):
        flags["adapted"] = adapted
        assert compiles(_gemv, of_gemv, {**sizes, **flags}, GemvTile(4, 1024, 4))
    operands |= {"left": "*fp32", "b": "*bf16", "ranks": "*i32", "slots": "*i32", "blocks": "*i32"}
    for tile in (SkinnyTile(64, 16, 128, 4, 4), SkinnyTile(16, 64, 64, 4, 3)):
        for as_columns in (False, True):
            ranks = {"adapted": as_columns or tile.tokens == 64, "as_columns": as_columns}
            assert compiles(_skinny, operands, {**sizes, **ranks, "room": 32, "splits": 2}, tile)
    in_parts = {**operands, "out": "*fp32"}
    plain = {**sizes, "gated": False, "has_bias": True, "adapted": False, "as_columns": False}
    plain |= {"room": 0, "splits": 0}
    assert compiles(_skinny, in_parts, plain, SkinnyTile(32, 64, 128, 4, 3, parts=2))


def test_row_kernels_compile_for_hopper():
    from ostinato.kernels.norms import triton_rows as kernels

    operands = pointers(torch.bfloat16, "x", "residual", "weight", "normed")
    constants = {"width": 1000, "block": 1024}
    of_norm = operands | {"deltas": "*fp32", "slots": "*i32", "eps": "fp32"}
    for parts in (1, 4):
        flags = {"has_residual": True, "has_deltas": parts == 1, "parts": parts}
        assert compiles(kernels._add_rms_norm, of_norm, {**constants, **flags})
    assert compiles(kernels._silu_mul, pointers(torch.bfloat16, "gate_up"), dict(constants))
    scaling = {**pointers(torch.bfloat16, "x", "weight", "scaled"), **pointers(torch.float32, "squares")}
    assert compiles(kernels._scale_rows, scaling, {"width": 960, "together": 64, "block": 1024})


def test_plain_sampling_compiles_for_hopper():
    from ostinato.kernels.sampling import triton_draw, triton_return

    rows = {"rows": "*i32", "is_taken": "*i32", "temperature": "*fp32", "seeds": "*i64", "lengths": "*i32"}
    found = {"best": "*fp32", "best_at": "*i32"}
    operands = {"logits": "*fp32", **rows, **found}
    constants = {"width": 151_936, "block": 2048, "greedy_below": 1e-5}
    for verifies in (False, True):
        kernel, flags = triton_draw._noisy_best_of_block, {**constants, "verifies": verifies}
        assert compiles(kernel, operands, flags, num_warps=4, maxnreg=triton_draw._REGISTERS)
    candidates = {"values": "*fp32", "tokens": "*i32"}
    lines = dict.fromkeys(("last_tokens", "ring", "counts", "began"), "*i64")
    sizes = {"head": 4, "rows_block": 16, "block": 64, "timed": True}
    assert compiles(triton_return._return_tokens, {"rows": "*i32", **candidates, **lines}, sizes)
