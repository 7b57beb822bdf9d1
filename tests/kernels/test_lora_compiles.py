"""The kernels of adapters compile for every architecture, and their shared memory has room, without a GPU."""

from typing import Any

import pytest

pytest.importorskip("triton")

import triton

from ostinato.kernels.gpu import Gpu
from ostinato.kernels.lora.choice import division
from ostinato.kernels.lora.triton_expand import _ROWS, _expand
from ostinato.kernels.lora.triton_grouping import _group
from ostinato.kernels.lora.triton_shrink import _shrink

GPUS = [Gpu((8, 0), 108), Gpu((8, 9), 58), Gpu((9, 0), 132), Gpu((10, 0), 148), Gpu((12, 0), 170)]
HOPPER = GPUS[2]
INTEGERS = ("ranks", "order", "blocks", "slots")
FLOATS = ("shrunk",)
SIZES = ("num_tokens", "num_blocks", "x_stride")


def compiled(
    gpu: Gpu, kernel: Any, constants: dict[str, Any], num_stages: int = 1, element: str = "*bf16"
) -> Any:
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    if "dependent" in kernel.arg_names:
        constants = {**constants, "dependent": gpu.capability >= (9, 0)}
    names = [name for name in kernel.arg_names if name not in constants]
    kinds = dict.fromkeys(INTEGERS, "*i32") | dict.fromkeys(FLOATS, "*fp32")
    kinds |= dict.fromkeys(SIZES, "i32")
    types = {name: kinds.get(name, element) for name in names} | dict.fromkeys(constants, "constexpr")
    places = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    # Rows begin at multiples of 16 bytes, as a launch would find out.
    aligned = {
        (kernel.arg_names.index(name),): [["tt.divisibility", 16]]
        for name in names
        if name not in SIZES or name == "x_stride"
    }
    source = ASTSource(kernel, types, constexprs=places, attrs=aligned)
    target = GPUTarget("cuda", gpu.capability[0] * 10 + gpu.capability[1], 32)
    found = triton.compile(source, target=target, options={"num_warps": 4, "num_stages": num_stages})
    assert found.metadata.shared <= gpu.shared_bytes
    return found


@pytest.fixture(autouse=True)
def _not_interpreted():
    if triton.knobs.runtime.interpret:
        pytest.skip("TRITON_INTERPRET is set: there is nothing to compile")


def shrink_constants(num_tokens: int, in_features: int, parts: int, *, norm: bool) -> dict[str, Any]:
    how = division(num_tokens, in_features)
    return {
        "in_features": in_features,
        "width": parts * 16,
        "room": 16,
        "tokens": how.tokens,
        "together": 16,
        "columns": how.columns,
        "splits": how.splits,
        "norm": norm,
    }


def compiled_pair(gpu: Gpu, num_tokens: int, element: str) -> tuple[Any, Any]:
    """Shrink and expand, for the QKV projection of Llama-3.1-8B."""
    how = division(num_tokens, 4096)
    num_stages = min(how.num_stages, 3 if element == "*bf16" else 2)
    shrunk = shrink_constants(num_tokens, 4096, 3, norm=num_tokens <= 16)
    expanded = {"out_features": 6144, "second": 4096, "third": 5120, "width": 48, "room": 16}
    expanded |= {"splits": how.splits, "tokens": max(16, how.tokens), "together": 16, "rows": _ROWS}
    return (
        compiled(gpu, _shrink, shrunk, num_stages, element),
        compiled(gpu, _expand, {**expanded, "is_new": num_tokens <= 64}, 1, element),
    )


@pytest.mark.parametrize(
    "gpu", [HOPPER, *(pytest.param(g, marks=pytest.mark.slow) for g in GPUS if g != HOPPER)], ids=str
)
def test_kernels_compile(gpu):
    """One token, some, a prompt: beside kernels of products shared memory is rare."""
    compiled(gpu, _group, {"slots_room": 64, "size": 16, "chunk": 128, "blocks_room": 32})
    for num_tokens, most in ((1, 2 << 10), (32, 36 << 10), (4096, gpu.shared_bytes)):
        shrink, expand = compiled_pair(gpu, num_tokens, "*bf16")
        assert shrink.metadata.shared <= most
        assert expand.metadata.shared <= 16 << 10
        for kernel in (shrink, expand) if gpu.capability >= (9, 0) else ():
            before, _ = kernel.asm["ptx"].split("griddepcontrol.wait", 1)
            assert "ld.global" in before, "weights are asked for before the wait"


@pytest.mark.slow
@pytest.mark.parametrize("gpu", GPUS, ids=str)
def test_float32_has_room_too(gpu):
    for num_tokens in (1, 32, 200, 4096):
        compiled_pair(gpu, num_tokens, "*fp32")
