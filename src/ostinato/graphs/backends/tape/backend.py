"""The CPU backend: graphs are tapes. A session records one; its segments make the recorded calls again."""

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

import torch

from ...blame import calling_line
from ...capture_queries import answering_capture_queries
from ...errors import CaptureError
from ...journal import SavedWrites
from ...memory import is_foreign
from ...options import CaptureOptions
from ...trees import Structure, flatten
from ..protocol import Kept, PoolMemory, Recording
from .arena import Layout, TapeMemory
from .calls import calling_again
from .program import Emitter, describe
from .recorder import Recorder
from .refusals import RefusalMode
from .storages import TensorSpec


class TapeSegment:
    """A stretch of calls without an eager one between them."""

    def __init__(self, calls: list[Callable[[], Any]]) -> None:
        self._calls = calls

    def replay(self) -> None:
        """Make the calls again."""
        with calling_again():
            for call in self._calls:
                call()


class TapeSession:
    """Records the step that the caller runs between `begin` and `finish`."""

    def __init__(self, memory: TapeMemory, options: CaptureOptions) -> None:
        self._memory = memory
        self._options = options
        self._recorder = Recorder()
        self._open = ExitStack()
        self._kept: list[tuple[Kept, list[Any], Structure]] = []

    def begin(self) -> None:
        assert not torch.is_inference_mode_enabled(), "record under no_grad instead of inference_mode"
        self._rng_state = torch.get_rng_state()
        self._open.enter_context(answering_capture_queries(self._is_recording))
        self._open.enter_context(self._recorder)
        self._open.enter_context(RefusalMode(self._is_recording))
        self._recorder.start_segment()

    def pause(self) -> None:
        self._recorder.stop_segment()

    def resume(self) -> None:
        self._recorder.start_segment()

    def keep(self, tree: Any) -> Kept:
        leaves, structure = flatten(tree)
        specs = [self._keep_leaf(leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        self._kept.append((Kept(), specs, structure))
        return self._kept[-1][0]

    def finish(self) -> Recording:
        self._close()
        self._recorder.storages.hold_survivors()
        records = self._recorder.storages.records
        layout = Layout(records, self._memory)
        emitter = Emitter(records, layout)
        with calling_again():
            segments = [emitter.calls_of(ops) for ops in self._recorder.segments]
        for kept, leaves, structure in self._kept:
            # Tensors of its own, never the program's: the holder may change their metadata in place.
            tensors = {spec: layout.tensor(spec) for spec in leaves if isinstance(spec, TensorSpec)}
            filled = [tensors[leaf] if isinstance(leaf, TensorSpec) else leaf for leaf in leaves]
            kept.tree = structure.filled(filled)
        self._memory.count_held(r.held for r in records if r.inside and r.held is not None)
        runs = [TapeSegment([call.run for call in calls]) for calls in segments]
        recording = Recording(runs, nodes=sum(map(len, segments)))
        if self._options.keep_graph:
            recording.raw = [[describe(call.op) for call in calls] for calls in segments]
        return recording

    def abort(self) -> None:
        self._close()

    def _is_recording(self) -> bool:
        return self._recorder.active

    def _keep_leaf(self, leaf: torch.Tensor) -> TensorSpec:
        if hasattr(leaf, "trigger_wait"):  # the result of a functional collective, still on its way
            leaf = leaf.trigger_wait()
        if is_foreign(leaf):
            raise CaptureError(
                f"a {type(leaf).__name__} cannot be an output of a captured step: return plain tensors",
                where=calling_line(),
            )
        return self._recorder.keep(leaf)

    def _close(self) -> None:
        """Stop recording and put everything outside back. What was saved goes too: it refers to tensors of
        the step, which must not look alive because of us."""
        self._recorder.stop_segment()
        self._open.close()
        saved, self._recorder.saved = self._recorder.saved, SavedWrites()
        saved.undo()
        if saved.draws_from_default:
            torch.set_rng_state(self._rng_state)


class TapeBackend:
    """Captures on any machine, with the rules of a CUDA graph."""

    name = "tape"
    device = torch.device("cpu")

    def new_memory(self, source: Any = None) -> PoolMemory:
        return TapeMemory(None if source is None else source.intermediates)

    def session(self, memory: PoolMemory, options: CaptureOptions) -> TapeSession:
        assert isinstance(memory, TapeMemory)
        return TapeSession(memory, options)

    def stream(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def release_unused(self) -> None:
        """The CPU allocator keeps nothing back."""

    def rng_state(self) -> torch.Tensor:
        return torch.get_rng_state()

    def set_rng_state(self, state: torch.Tensor) -> None:
        torch.set_rng_state(state)

    def order_replays(self) -> None:
        """Replays run on the caller's thread, in order."""
