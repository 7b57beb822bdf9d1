"""Kernels of sampling, norms and the head of a step compile for every architecture, without a GPU."""

from typing import Any

import pytest

triton = pytest.importorskip("triton")

from kernels.test_asking_rows import FIELDS, KERNELS, SIZES  # noqa: E402
from kernels.test_asking_rows import kernel_of as asking_kernel_of  # noqa: E402
from kernels.test_triton_kernels import compiled  # noqa: E402

TYPES = FIELDS | dict.fromkeys(("best", "squares"), "*fp32")
TYPES |= dict.fromkeys(("best_at", "is_taken", "seq_lens", "query_lens"), "*i32")
TYPES |= dict.fromkeys(("input_ids", "positions", "began"), "*i64")
TYPES |= dict.fromkeys(("x", "residual", "weight", "normed", "scaled", "gate_up"), "*bf16") | {"eps": "fp32"}
CONSTANTS = SIZES | {"rows_block": 16}
NORMS = {"has_deltas": False, "width": 1024, "block": 1024, "parts": 2, "together": 64, "has_residual": True}


NAMES = ("begin", "norm", "half a norm", "gate", "draw", "return", *KERNELS)


def kernel_of(name: str) -> tuple[Any, dict[str, Any]]:
    """With the constants that are its own."""
    from ostinato.kernels.decode_inputs import triton_request_rows
    from ostinato.kernels.norms import triton_rows
    from ostinato.kernels.sampling import triton_draw, triton_return

    if name in KERNELS:
        return asking_kernel_of(name)[:2]
    return {
        "begin": (triton_request_rows._begin_decode, {"block": 128}),
        "norm": (triton_rows._add_rms_norm, NORMS),
        "half a norm": (triton_rows._scale_rows, NORMS),
        "gate": (triton_rows._silu_mul, NORMS),
        "draw": (triton_draw._noisy_best_of_block, {"verifies": True, "block": 2048}),
        "return": (triton_return._return_tokens, {"block": 128}),
    }[name]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "capability", [80, *(pytest.param(later, marks=pytest.mark.slow) for later in (89, 100, 120))]
)
def test_small_kernels_compile(capability: int, name: str) -> None:
    """Those for Hopper are compiled beside their own tests."""
    if triton.knobs.runtime.interpret:
        pytest.skip("TRITON_INTERPRET is set: there is nothing to compile")
    kernel, own = kernel_of(name)
    given = CONSTANTS | own | {"dependent": capability >= 90}
    constants = {name: value for name, value in given.items() if name in kernel.arg_names}
    types = {name: TYPES.get(name, "i32") for name in kernel.arg_names if name not in constants}
    assert compiled(kernel, types, constants, capability, num_warps=8)
