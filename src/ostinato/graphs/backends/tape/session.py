"""One recording on the tape, and the tape that comes out of it."""

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch

from ...blame import calling_line
from ...capturing.journal import WriteJournal
from ...capturing.options import CaptureOptions
from ...errors import CaptureError
from ...memory import is_foreign
from ...trees import Structure, flatten
from .arena import TapeMemory
from .layout import Layout
from .program import Call, Emitter, describe
from .recorder import Recorder
from .refusals import RefusalMode, answering_capture_queries
from .storages import TensorSpec


class TapeSegment:
    """A stretch of calls without an eager one between them."""

    def __init__(self, calls: list[Call]) -> None:
        self._calls = [call.run for call in calls]

    def replay(self) -> None:
        """Make the calls again. What the caller has switched on (autocast, modes on functions) was part of
        the recording if it was on then, and must not act a second time."""
        autocast = torch.is_autocast_enabled("cpu")
        if autocast:
            torch.set_autocast_enabled("cpu", False)
        try:
            with torch.no_grad(), torch._C._AutoDispatchBelowAutograd(), torch._C.DisableTorchFunction():
                for call in self._calls:
                    call()
        finally:
            if autocast:
                torch.set_autocast_enabled("cpu", True)


class Tape:
    """A finished recording."""

    def __init__(self, segments: list[list[Call]], *, keep_raw: bool) -> None:
        self.segments: Sequence[TapeSegment] = [TapeSegment(calls) for calls in segments]
        self.nodes: int = sum(len(calls) for calls in segments)
        self.raw: list[list[str]] | None = (
            [[describe(call.op) for call in calls] for calls in segments] if keep_raw else None
        )


class TapeKept:
    """Tensors announced while recording, found again afterwards."""

    def __init__(self, leaves: list[Any], structure: Structure) -> None:
        self._leaves = leaves
        self._structure = structure
        self._resolved = False

    def settle(self, layout: Layout) -> None:
        # Tensors of its own, never the program's: the holder may change their metadata in place.
        tensors: dict[TensorSpec, torch.Tensor] = {}
        for index, leaf in enumerate(self._leaves):
            if isinstance(leaf, TensorSpec):
                if leaf not in tensors:
                    tensors[leaf] = layout.tensor(leaf)
                self._leaves[index] = tensors[leaf]
        self._resolved = True

    def resolve(self) -> Any:
        assert self._resolved, "the recording is not finished"
        return self._structure.filled(self._leaves)


class TapeSession:
    """Records the step that the caller runs between `begin` and `finish`."""

    def __init__(self, memory: TapeMemory, options: CaptureOptions) -> None:
        self._memory = memory
        self._options = options
        self._recorder = Recorder()
        self._journal: WriteJournal | None = None
        self._open = ExitStack()
        self._kept: list[TapeKept] = []

    def begin(self) -> None:
        assert not torch.is_inference_mode_enabled(), "record under no_grad instead of inference_mode"
        self._rng_state = torch.get_rng_state()
        self._journal = WriteJournal()
        self._open.enter_context(answering_capture_queries(self._is_recording))
        self._open.enter_context(self._journal)
        self._open.enter_context(self._recorder)
        self._open.enter_context(RefusalMode(self._is_recording))
        self._recorder.start_segment()

    def pause(self) -> None:
        self._recorder.stop_segment()

    def resume(self) -> None:
        self._recorder.start_segment()

    def keep(self, tree: Any) -> TapeKept:
        leaves, structure = flatten(tree)
        specs = [self._keep_leaf(leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        kept = TapeKept(specs, structure)
        self._kept.append(kept)
        return kept

    def finish(self) -> Tape:
        self._close()
        storages = self._recorder.storages
        storages.hold_survivors()
        records = storages.records
        layout = Layout(records, self._memory)
        emitter = Emitter(records, layout)
        tape = Tape(
            [emitter.calls_of(ops) for ops in self._recorder.segments], keep_raw=self._options.keep_graph
        )
        for kept in self._kept:
            kept.settle(layout)
        self._memory.count_held(
            record.held for record in records if record.inside and record.held is not None
        )
        return tape

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
        """Stop recording and put everything outside back. The journal goes too: it refers to tensors of the
        step, which must not look alive because of us."""
        self._recorder.stop_segment()
        self._open.close()
        if self._journal is not None:
            self._journal.undo()
            if self._journal.draws_from_default:
                torch.set_rng_state(self._rng_state)
            self._journal = None
