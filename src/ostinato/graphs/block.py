"""Any code between two lines, recorded over tensors that stay where they are, and replayed by hand.

`torch.cuda.graph` with the runtime's promises: a gate and a lock around the capture, a frozen garbage
collector, errors that name the user's line, a check before every replay that what the block read is still
there, and the same on a CPU. What the runtime does for functions it cannot do for a block, which runs once:
warm-ups, padding, verification.
"""

import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from .capturing.captured import Recorded, being_recorded
from .capturing.gate import capture_gate, frozen_gc, turn
from .capturing.pool import GraphPool
from .capturing.segments import Bridges
from .checking.addresses import AddressBook, Watched
from .dispatch_mode import DispatchMode
from .dispatching.mode import GraphMode
from .dispatching.step_mode import step_mode
from .errors import CaptureError
from .memory import is_foreign, is_plain, storage_address, tensors_of
from .options import CaptureOptions

_LIFTS = (torch.ops.aten.lift_fresh.default, torch.ops.aten.lift.default)
_OR_ELSE = "capture the block again"


class CapturedBlock:
    """A block of code as one graph. Made by `capture_block`; it can be replayed when the block has ended."""

    leaves: tuple[torch.Tensor, ...] = ()
    """The pool asks every graph for its results; only the block's own code holds those of a block."""

    def __init__(self, pool: GraphPool) -> None:
        """See `capture_block`."""
        self.pool = pool
        self.replays = 0
        """Counts the replays."""
        self._recorded: Recorded | None = None
        self._addresses = AddressBook()
        self._is_watched_by_name = False

    def replay(self) -> None:
        """Do the block's device work again, on what its tensors hold now.

        AddressError, before anything is done, if a tensor that it reads was freed or has moved.
        """
        graph = self._finished.graph
        with turn:
            if self._is_watched_by_name or not self._addresses.reads_hold:
                self.check_addresses()
            self.pool.backend.order_replays()
            self.pool.overwrite()
            graph.replay()
            self.replays += 1

    def check_addresses(self) -> None:
        """Raise AddressError if a tensor that the block reads was freed or has moved since the capture."""
        self._addresses.check(_OR_ELSE)

    @property
    def nodes(self) -> int | None:
        """Number of recorded operations; None where the device cannot tell."""
        return self._finished.nodes

    @property
    def bytes(self) -> int:
        """By how much the capture made the pool grow."""
        return self._finished.bytes

    @property
    def seconds(self) -> float:
        """Duration of the capture."""
        return self._finished.seconds

    @property
    def _finished(self) -> Recorded:
        if self._recorded is None:
            raise CaptureError(
                "the block has not been captured: its code is still running, or has raised. Replay it after "
                "the end of `with capture_block() as block:`"
            )
        return self._recorded

    def _finish(self, recorded: Recorded, reads: Iterable[torch.Tensor], watched: Watched | None) -> None:
        self._recorded = recorded
        self._addresses.note_reads(reads)
        if watched is not None:
            self._addresses.watch(watched)
            self._is_watched_by_name = True
        self.pool.graphs.add(self)


@contextmanager
def capture_block(
    *,
    pool: GraphPool | None = None,
    watch: Watched | None = None,
    generators: tuple[torch.Generator, ...] = (),
    freeze_gc: bool = True,
) -> Iterator[CapturedBlock]:
    """Record the code of a `with` statement as a graph over the tensors that it uses.

        for _ in range(2):
            y = model(x)  # once or twice before, so that all kernels are there
        with capture_block() as block:
            y = model(x)
        x.copy_(new)
        block.replay()  # y holds the result

    The code must have run before, with the same shapes: what is compiled or created at first use cannot be
    recorded. Recording changes nothing that existed before, and what the block makes holds values only after
    a replay. A replay does the device work again and no Python: it reads the tensors of the capture, whatever
    variables stand for now. So copy new inputs into them.

    Args:
        pool: memory shared with other graphs, on the device to capture for; default: a new pool on the GPU,
            or on the CPU where there is none. A replay of any graph of a pool overwrites what others left.
        watch: tensors that must stay where they are, by name, or a module. What torch's operations read is
            watched anyway; kernels of other libraries and compiled code are not seen.
        generators: random generators that the block draws from, besides the device's default one.
        freeze_gc: collect garbage first and freeze the collector while recording.
    """
    block = CapturedBlock(pool or GraphPool("cuda" if torch.cuda.is_available() else "cpu"))
    options = CaptureOptions(generators=generators, freeze_gc=freeze_gc)
    bridges, reads = Bridges(block.pool.allocate_for_graphs), _Reads()
    with capture_gate(), frozen_gc(freeze_gc), step_mode(GraphMode.NONE):
        with being_recorded(block.pool, options, bridges, piecewise=False, with_grad=True) as ongoing:
            with reads:
                yield block
    assert ongoing.recorded is not None
    block._finish(ongoing.recorded, reads.still_there(), watch)


class _Reads(DispatchMode):
    """Sees which tensors from before a block are used in it, except in compiled code, which stays so."""

    def __init__(self) -> None:
        super().__init__()
        self._seen: dict[int, weakref.ref[torch.Tensor]] = {}
        self._made: set[int] = set()

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Torch asks whether compiled code may run beneath this mode."""
        return True

    def still_there(self) -> list[torch.Tensor]:
        """Those that are still alive."""
        return [tensor for ref in self._seen.values() if (tensor := ref()) is not None]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = tensors_of((args, kwargs))
        if any(map(is_foreign, given)):
            return NotImplemented
        if func in _LIFTS:
            self._made.update(map(storage_address, given))
        known = {storage_address(tensor): tensor for tensor in given if is_plain(tensor)}
        for address, tensor in known.items():
            if address not in self._made:
                self._seen.setdefault(address, weakref.ref(tensor))
        result = func(*args, **kwargs)
        made = [storage_address(tensor) for tensor in tensors_of(result) if is_plain(tensor)]
        self._made.update(address for address in made if address not in known)
        return result
