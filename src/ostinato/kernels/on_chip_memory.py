"""How much of a SM's on-chip memory is shared memory while a kernel runs; the rest is L1 cache.

A SM changes the division only while nothing runs on it, so kernels that overlap should want the
same. A kernel that wants nothing runs with whatever the last one left behind, if it has room: a product by
GEMV, whose loads are on their way through L1, took a tenth longer behind kernels with much shared memory.
"""

from functools import cache
from typing import Any

AS_IT_IS = -1
"""Percent: whatever the driver makes of it."""
MOSTLY_L1 = 3
"""Room for the few sums that warps of a GEMV exchange; with 0 fewer CTAs fit."""
ALL_SHARED = 100

_with_much_l1: set[int] = set()
_WANTS_L1 = "_ostinato_wants_l1"


def prefer_l1(launched: Any) -> None:
    """Of a Triton kernel, as its launch returns it: from the next launch on; `loaded` says it of one that was
    only collected."""
    if not hasattr(launched, "__dict__"):
        return
    # A kernel that is not compiled yet would be, were it asked for an attribute.
    function = vars(launched).get("function")
    if function is None:
        vars(launched)[_WANTS_L1] = True
    elif function not in _with_much_l1 and _has_driver():
        prefer(function, MOSTLY_L1)
        _with_much_l1.add(function)


def loaded(collected: Any, kernel: Any) -> None:
    """Applies `prefer_l1` to a kernel that its launch had only collected."""
    if _WANTS_L1 in vars(collected):
        prefer_l1(kernel)


@cache
def _has_driver() -> bool:
    """Tells whether NVIDIA's Python bindings are there; torch for CUDA brings them."""
    try:
        import cuda.bindings.driver  # noqa: F401
    except ImportError:
        return False
    return True


def prefer(function: Any, percent: int) -> None:
    """Sets the share of shared memory of a loaded kernel, from the next launch on."""
    from cuda.bindings import driver

    attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT
    (status,) = driver.cuFuncSetAttribute(driver.CUfunction(int(function)), attribute, percent)
    if int(status) != 0:
        raise RuntimeError(f"cuFuncSetAttribute: {status.name}")
