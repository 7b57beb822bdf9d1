# mypy: allow-untyped-defs
"""Programmatic dependent launch: a kernel begins while the one before it ends.

    kernel A   ....compute....|store|
    kernel B        |weights -> registers, L2| wait |compute ...

A kernel says early that its successor may be launched; the successor fetches what no earlier kernel of the
step writes (weights, page tables, old keys and values), then waits until its predecessor is complete and its
stores are visible. Every kernel here waits before it reads or writes anything of the step, so completion is
transitive: when B waits for A, all before A is done too.

Note [What may be read before the wait]
Weights, and static buffers that are only written before the step's first kernel. That kernel is a plain
launch (an embedding lookup), which starts after everything before it is complete. Likewise behind any later
plain launch (`sampling.triton_adjusted`): what was written before it.
What is written before the wait must be memory that no kernel still under way has used: reserve it first.

Note [A kernel that another one overtakes]
`cuda/shrink.cu` runs before a product and needs the same tokens; only the second half of the product needs
what it leaves. So it says when it has waited, which means that the tokens are complete; the product waits for
that, multiplies, and waits for the kernel itself in the middle:

    norm      ...|
    shrink       |"not ready"| wait |"ready", shrink ...|
    product                  | until ready | multiply ... | wait, add what adapters add, multiply ...

The place is in memory of the step. "Not ready" is said before the product may start, and no kernel that says
it starts before all CTAs of the product before have read "ready".
"""

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl

INTERPRETED: bool = bool(triton.knobs.runtime.interpret)
"""Whether kernels run in Triton's interpreter, on any device."""


@cache
def is_supported(device: torch.device) -> bool:
    """Hopper and later have it."""
    if INTERPRETED or device.type != "cuda":
        return False
    return torch.cuda.get_device_capability(device) >= (9, 0)


def options(device: torch.device, *, plain: bool = False) -> dict[str, Any]:
    """Launch options of a kernel with a `dependent` constant that calls `wait_for_previous`.

    `plain`: it starts when all before it is complete.
    """
    if is_supported(device) and not plain:
        return {"dependent": True, "launch_pdl": True}
    return {"dependent": False}


@triton.jit
def let_next_start(dependent: tl.constexpr):
    """For a plain launch, which waits for nothing itself."""
    if dependent:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def wait_for_previous(dependent: tl.constexpr):
    """Let the next kernel start, then wait for the previous one."""
    let_next_start(dependent)
    if dependent:
        tl.extra.cuda.gdc_wait()
