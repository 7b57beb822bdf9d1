"""Whether an optimizer that nobody knows fits into a graph: found out by recording its step alone."""

import torch

from ..capturing.captured import record
from ..capturing.gate import capture_gate
from ..capturing.pool import GraphPool
from ..capturing.segments import Bridges
from ..capturing.trial import Trials
from ..options import CaptureOptions
from .optimizers import StaticOptimizer

_WARMUPS = 2


def why_not_in_a_graph(
    optimizer: StaticOptimizer, device: torch.device, options: CaptureOptions
) -> Exception | None:
    """What goes wrong if its step is recorded. Parameters, which need gradients, and state stay."""
    if optimizer.is_known or optimizer.why_behind is not None:
        return None
    pool, skipped = GraphPool(device), torch.ones((), device=device)
    state = {str(number): tensor for number, tensor in enumerate(optimizer.changing())}
    trials = Trials(pool.backend, state=state, generators=options.generators)
    try:
        with optimizer.undone_in_python(), optimizer.without_hooks(), trials.undone(), torch.no_grad():
            with capture_gate(), pool.backend.stream():
                for _ in range(_WARMUPS):
                    optimizer.step(skipped)
                bridges = Bridges(pool.allocate_for_graphs)
                record(lambda: optimizer.step(skipped), pool, options, bridges, piecewise=False)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        return error
    return None
