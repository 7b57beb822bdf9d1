"""Whether an unknown optimizer fits into a graph: determined by recording its step alone."""

from collections.abc import Callable, Iterable

import torch

from ..blame import raising_line
from ..capturing import python_draws
from ..capturing.captured import record
from ..capturing.gate import capture_gate
from ..capturing.pool import GraphPool
from ..capturing.segments import Bridges
from ..capturing.trial import Trials
from ..errors import CaptureError
from ..journal import WriteJournal
from ..memory import storage_address
from ..options import CaptureOptions
from ..wrapping.reached import Reached
from .optimizers import StaticOptimizer

_WARMUPS = 2


def why_not_in_a_graph(
    optimizer: StaticOptimizer, device: torch.device, options: CaptureOptions
) -> CaptureError | None:
    """The error if its step is recorded, or None. Parameters, which need gradients, and state stay."""
    if optimizer.is_known or optimizer.why_behind is not None:
        return None
    error = _error_of_recording(optimizer, device, options)
    if error is None:
        optimizer.become_static()
        return None
    with optimizer.rates_as_numbers():
        other = _error_of_recording(optimizer, device, options)
    if other is None:
        return CaptureError(
            f"{type(optimizer.wrapped).__name__} needs its learning rate as a Python number, but a graph can "
            f"read one that changes only from a tensor, as in p.sub_(update * group['lr']). Nothing is wrong "
            f"with it",
            where=raising_line(error.__traceback__),
        )
    if isinstance(other, CaptureError):  # and no doing of ours
        return other
    return CaptureError(
        f"its step fails while it is recorded with {type(other).__name__}: {other}".rstrip(": "),
        where=raising_line(other.__traceback__),
    )


def _error_of_recording(
    optimizer: StaticOptimizer, device: torch.device, options: CaptureOptions
) -> Exception | None:
    pool, skipped = GraphPool(device), torch.ones((), device=device, dtype=torch.float32)
    try:
        with optimizer.undone_in_python(), optimizer.without_hooks(), torch.no_grad():
            optimizer.become_static()
            optimizer.refuse_state_elsewhere()
            changing = [*optimizer.changing(), *(p.grad for p in optimizer.parameters if p.grad is not None)]
            state = {str(number): tensor for number, tensor in enumerate(changing)}
            trials = Trials(pool.backend, state=state, generators=options.generators)
            with trials.undone(), capture_gate(), pool.backend.stream(), python_draws.undone():
                _refuse_what_lies_elsewhere(optimizer, lambda: optimizer.step(skipped), changing)
                for _ in range(_WARMUPS):
                    optimizer.step(skipped)
                bridges = Bridges(pool.allocate_for_graphs)
                record(lambda: optimizer.step(skipped), pool, options, bridges, piecewise=False)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        return error
    return None


def _refuse_what_lies_elsewhere(
    optimizer: StaticOptimizer, step: Callable[[], None], known: Iterable[torch.Tensor]
) -> None:
    """Raises CaptureError if a step changes more than parameters and the tensors of their state, such as its
    own count or a matrix in a list. A graph would not continue the former, and a skipped update would change
    the latter."""
    wrapped, journal = optimizer.wrapped, WriteJournal()
    name, of_parameters = type(wrapped).__name__, map(vars, optimizer.parameters)
    before = Reached(*wrapped.state.values(), vars(wrapped), *of_parameters)
    try:
        with journal:
            step()
        changed = sorted({str(key) for _, key in before.changed()})
    finally:
        journal.undo()
        before.put_back(before.changed())
    if changed:
        raise CaptureError(
            f"{name} keeps {', '.join(changed[:3])} in Python or in a tensor created anew in every step: a "
            f"graph would repeat one step forever"
        )
    if journal.written - {storage_address(tensor) for tensor in known}:
        raise CaptureError(
            f"{name} writes to tensors that are neither parameters nor entries of their state: keep each as "
            f"its own entry, state[parameter][name]"
        )
