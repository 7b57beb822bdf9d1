# mypy: allow-untyped-defs
# (Triton gives a meaning of its own to the annotations of a kernel's parameters.)
"""CTAs of a row that wait for each other inside one kernel.

Note [CTAs that wait for each other]
A kernel for each pass would be launched in every step, and most steps need none of them. So all passes of a
row are in one kernel, and its CTAs meet between them. They must then be on the GPU at the same time: a
row has no more CTAs than there are SMs, CTAs start in the order of their numbers, those
of a row one after another, and a row waits for no other one. So the first row that has not ended has all its
CTAs running, whatever else is in the queue: the next kernel, whose CTAs wait on the GPU for this one
to be complete, begins when all of this one have started. Who waits for seconds all the same stops the kernel
with an error.

The interpreter runs one CTA after another: there each pass is a launch of its own.
"""

import triton
import triton.language as tl

from ...gpu import Gpu
from ...host_sizes import cdiv

_MOST_TRIES = tl.constexpr(1 << 24)
"""Each takes about half a microsecond."""
_PROGRAMS_WANTED, _MOST_BLOCKS = 512, 8
"""So many CTAs fill a GPU, and each has much to find out before its first block."""
MEETING_REGISTERS = 128
"""Of a thread: CTAs mostly return at once, and have to find room beside other kernels."""


@triton.jit
def meet(met, goal):
    """Go on when `met` has been counted up to `goal`; what the others stored before is then visible."""
    tl.debug_barrier()  # every thread has stored what it found
    count = tl.atomic_add(met, 1) + 1
    tries = 0
    while count < goal:
        count = tl.atomic_add(met, 0)
        tries += 1
        if tries > _MOST_TRIES:
            tl.inline_asm_elementwise("trap; mov.u32 $0, 0;", "=r", [], tl.int32, is_pure=False, pack=1)
    tl.debug_barrier()


def blocks_each_of(num_rows: int, num_blocks: int, gpu: Gpu) -> int:
    """Returns the blocks of a CTA. All CTAs of a row must fit on the GPU at a time."""
    wanted = max(1, min(_MOST_BLOCKS, num_rows * num_blocks // _PROGRAMS_WANTED))
    return max(wanted, cdiv(num_blocks, gpu.multiprocessors))
