"""Record a step on a tape and compare its replays with the eager step."""

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

from ostinato.graphs.backends import Recording
from ostinato.graphs.backends.tape import TapeBackend, TapeMemory
from ostinato.graphs.options import CaptureOptions


class Recorded:
    """A tape with its output and the memory it lives in."""

    def __init__(self, tape: Recording, out: Any, memory: TapeMemory) -> None:
        self.tape, self.out, self.memory = tape, out, memory

    def replay(self) -> Any:
        for segment in self.tape.segments:
            segment.replay()
        return self.out


def record(
    step: Callable[..., Any],
    *args: Any,
    memory: TapeMemory | None = None,
    grad: bool = False,
    keep_graph: bool = False,
) -> Recorded:
    """Record `step(*args)` the way the runtime does."""
    backend = TapeBackend()
    memory = memory or backend.new_memory()
    session = backend.session(memory, CaptureOptions(keep_graph=keep_graph))
    with torch.set_grad_enabled(grad):
        session.begin()
        try:
            kept = session.keep(step(*args))
        except BaseException:
            session.abort()
            raise
    tape = session.finish()
    return Recorded(tape, kept.tree, memory)


def same(left: Any, right: Any) -> bool:
    """Bitwise equality of pytrees, NaN equal to itself."""
    pairs = list(zip(tree_leaves(left), tree_leaves(right), strict=True))
    return all(
        (a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0)))
        if isinstance(a, torch.Tensor)
        else a == b
        for a, b in pairs
    )


def copies(tree: Any) -> Any:
    return tree_map(lambda x: x.clone() if isinstance(x, torch.Tensor) else x, tree)


def scramble(tree: Any, seed: int) -> None:
    """New values of the same kind in every tensor, in place."""
    generator = torch.Generator().manual_seed(seed)
    for tensor in tree_leaves(tree):
        if isinstance(tensor, torch.Tensor):
            if tensor.is_floating_point():
                tensor.copy_(torch.randn(tensor.shape, generator=generator))
            elif tensor.dim() and not tensor.is_complex():
                tensor.copy_(
                    tensor.flatten()[torch.randperm(tensor.numel(), generator=generator)].view_as(tensor)
                )


def check_replays(step: Callable[..., Any], *args: Any, values: int = 3) -> Recorded:
    """Replays equal eager runs, in results and in what they write, for several values of the inputs."""
    before, rng = copies(args), torch.get_rng_state()
    recorded = record(step, *args)
    assert same(args, before), "recording changed its inputs"
    assert torch.equal(torch.get_rng_state(), rng), "recording drew from the generator"
    for seed in range(values):
        scramble(args, seed)
        eager_args = copies(args)
        torch.manual_seed(seed)
        with torch.no_grad():
            expected = copies(step(*eager_args))
        drawn = torch.get_rng_state()
        torch.manual_seed(seed)
        got = recorded.replay()
        assert same(got, expected), f"replay {seed} differs from eager"
        assert same(args, eager_args), f"replay {seed} wrote something else than eager"
        assert torch.equal(torch.get_rng_state(), drawn), "replay drew other random numbers than eager"
    return recorded
