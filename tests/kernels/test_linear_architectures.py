"""Kernels of linear layers compile for every architecture that they run on, without a GPU.

Triton brings an assembler of its own (two: one for Blackwell); CUDA C++ goes through NVRTC.
"""

from typing import Any

import pytest
import torch

pytest.importorskip("triton")

import triton

from ostinato.kernels.cuda import compiled
from ostinato.kernels.gpu import Gpu
from ostinato.kernels.linear.choice import package_table
from ostinato.kernels.linear.cuda_few_tokens import few_tokens_kernel, gemv_kernel
from ostinato.kernels.linear.cuda_prompt import prompt_kernel
from ostinato.kernels.linear.cuda_wide import wide_kernel
from ostinato.kernels.linear.rules import gemv_tile
from ostinato.kernels.linear.tiles import (
    FOR_HOPPER,
    IN_CUDA,
    CudaGemvTile,
    FragmentsTile,
    GemvTile,
    MatrixShape,
    PromptTile,
    SkinnyTile,
    StreamedTile,
    Tile,
    WideTile,
)

GPUS = {
    "A100": Gpu((8, 0), 108),
    "L4": Gpu((8, 9), 58),
    "RTX 4090": Gpu((8, 9), 128),
    "H200": Gpu((9, 0), 132),
    "B200": Gpu((10, 0), 148),
    "RTX 5090": Gpu((12, 0), 170),
}
ARCHITECTURES = [GPUS[name] for name in ("A100", "L4", "H200", "B200", "RTX 5090")]
needs_nvrtc = pytest.mark.skipif(not compiled.has_nvrtc(), reason="needs NVRTC and cuda-bindings")


def shared_bytes_of(gpu: Gpu, shape: MatrixShape, tile: GemvTile | SkinnyTile) -> int:
    """Compile the Triton kernel of a tile; what a program takes."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from ostinato.kernels.linear.triton_gemv import _gemv
    from ostinato.kernels.linear.triton_skinny import _skinny

    kernel = _gemv if isinstance(tile, GemvTile) else _skinny
    constants: dict[str, Any] = {**shape._asdict(), "has_bias": False, "norm": True, "has_residual": False}
    constants |= vars(tile) | {"dependent": gpu.capability >= (9, 0), "adapted": False}
    constants["as_columns"] = False
    constants |= dict.fromkeys(("second_part", "third_part", "splits", "room", "width"), 1)
    constants = {name: value for name, value in constants.items() if name in kernel.arg_names}
    types = dict.fromkeys(kernel.arg_names, "*bf16") | {"eps": "fp32", "num_tokens": "i32"}
    types = {name: kind for name, kind in types.items() if name in kernel.arg_names and name not in constants}
    places = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    source = ASTSource(kernel, types | dict.fromkeys(constants, "constexpr"), constexprs=places)
    options = {name: getattr(tile, name) for name in ("num_warps", "num_stages") if hasattr(tile, name)}
    target = GPUTarget("cuda", gpu.capability[0] * 10 + gpu.capability[1], 32)
    found = triton.compile(source, target=target, options=options)
    assert found.asm["cubin"]
    return found.metadata.shared


@pytest.fixture(autouse=True)
def _not_interpreted():
    if triton.knobs.runtime.interpret:
        pytest.skip("TRITON_INTERPRET is set: there is nothing to compile")


def with_slow(few: list[Any], more: list[Any]) -> list[Any]:
    return [*few, *(pytest.param(*each, marks=pytest.mark.slow) for each in more)]


OF_SOME_TOKENS = MatrixShape(1024, 2048), SkinnyTile(16, 64, 128, 4, 3, parts=2)
ODD = MatrixShape(333, 1000, True), SkinnyTile(32, 64, 64, 4, 3)
MANY = MatrixShape(3072, 1024, True), SkinnyTile(64, 32, 64, 4, 4)


@pytest.mark.parametrize(
    ("gpu", "shape"),
    with_slow(
        [(gpu, MatrixShape(3072, 1024, True)) for gpu in ARCHITECTURES],
        [
            (gpu, shape)
            for gpu in ARCHITECTURES
            for shape in (MatrixShape(6144, 2560), MatrixShape(9728, 2560, True), MatrixShape(2560, 9728))
        ],
    ),
    ids=str,
)
def test_one_token_compiles_for_every_architecture(gpu, shape):
    """It is what runs there by rule."""
    assert shared_bytes_of(gpu, shape, gemv_tile(shape, gpu)) <= gpu.shared_bytes


@pytest.mark.parametrize(
    ("gpu", "shape", "tile"),
    with_slow(
        [(gpu, *OF_SOME_TOKENS) for gpu in ARCHITECTURES],
        [(gpu, *each) for gpu in ARCHITECTURES for each in (ODD, MANY)],
    ),
    ids=str,
)
def test_products_of_some_tokens_compile_for_every_architecture(gpu, shape, tile):
    """`ostinato tune` may choose them there; what they take is as it counts."""
    assert shared_bytes_of(gpu, shape, tile) <= gpu.shared_bytes


def source_of(shape: MatrixShape, tile: Tile, num_tokens: int) -> compiled.CudaKernel:
    form = {"norm": shape.in_features <= shape.out_features}
    match tile:
        case CudaGemvTile():
            return gemv_kernel(tile, shape, **form)
        case FragmentsTile():
            return few_tokens_kernel(tile, shape, tile.compiled_tokens(num_tokens), **form)
        case StreamedTile():
            return few_tokens_kernel(tile, shape, tile.compiled_tokens(num_tokens), **form)
        case WideTile():
            return wide_kernel(tile, shape, scaled=True)
    raise AssertionError(tile)


def compile_for(gpu: Gpu, kernel: compiled.CudaKernel) -> bytes:
    source = compiled.source(kernel._file)
    options = compiled._options(gpu.capability, kernel._constants)
    return compiled._compile(source, kernel._file, options)[0]


def of_the_table(*kinds: type[Tile]) -> list[tuple[MatrixShape, Tile, int]]:
    table = package_table(GPUS["H200"])
    assert table is not None
    return [
        (shape, choice.tile, choice.last)
        for shape, choices in table.choices.items()
        for choice in choices
        if isinstance(choice.tile, kinds)
    ]


ON_BLACKWELL = [kind for kind in IN_CUDA if kind not in FOR_HOPPER]


@needs_nvrtc
@pytest.mark.parametrize(
    ("shape", "tile", "num_tokens"),
    with_slow(
        [of_the_table(kind)[0] for kind in ON_BLACKWELL],
        [each for kind in ON_BLACKWELL for each in of_the_table(kind)[1:]],
    ),
    ids=str,
)
def test_cuda_sources_compile_for_blackwell_too(shape, tile, num_tokens):
    """Those for Hopper: test_cuda_sources.py."""
    assert compile_for(GPUS["B200"], source_of(shape, tile, num_tokens))


@needs_nvrtc
@pytest.mark.parametrize("kind", FOR_HOPPER)
def test_kernels_with_hoppers_own_products_are_for_hopper_alone(kind, monkeypatch):
    """Later GPUs have no such instruction: the compiler says so, and nothing asks for it there."""
    if kind is PromptTile:
        kernel = prompt_kernel(gated=True, added=False, bias=False)
    else:
        kernel = source_of(*of_the_table(kind)[0])
    assert compile_for(GPUS["H200"], kernel)
    for name in ("B200", "RTX 5090"):
        with pytest.raises(compiled.CudaError, match=r"wgmma|does not compile|NVRTC_ERROR"):
            compile_for(GPUS[name], kernel)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, name=name: GPUS[name].capability)
        compiled.is_supported.cache_clear()
        assert not compiled.has_warpgroup_products(torch.device("cuda", 0))
    compiled.is_supported.cache_clear()


@pytest.mark.parametrize("name", GPUS)
def test_what_keeps_cuda_kernels_from_a_gpu_is_said(name, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: GPUS[name].capability)
    monkeypatch.setattr(compiled, "has_nvrtc", lambda: True)
    reason = compiled.why_unsupported(torch.device("cuda", 0))
    assert (reason is None) == (name in ("H200", "B200"))
    assert reason is None or "sm_{}{}".format(*GPUS[name].capability) in reason
    monkeypatch.setattr(compiled, "has_nvrtc", lambda: False)
    assert compiled.why_unsupported(torch.device("cuda", 0)) is not None
