"""Steps, batches and runners that the contract tests share."""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

from ostinato.graphs import (
    BatchDescriptor,
    BatchShape,
    CaptureOptions,
    CudaGraphRunner,
    Dispatcher,
    Field,
    GraphKey,
    GraphMode,
    InputBuffers,
    graphed,
)
from ostinato.graphs.capturing.gate import is_recording  # noqa: F401  (for steps that behave differently then)

WIDTH = 8


def randn(
    *shape: int, device: torch.device, seed: int = 0, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """Random numbers that are the same on every device."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def ints(values: Sequence[int], device: torch.device, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype, device=device)


def mlp(
    device: torch.device, *, width: int = WIDTH, dtype: torch.dtype = torch.float32
) -> torch.nn.Sequential:
    """Two layers with fixed weights, in eval mode; its parameters require gradients, as a user's do."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        model = torch.nn.Sequential(
            torch.nn.Linear(width, 2 * width), torch.nn.GELU(), torch.nn.Linear(2 * width, width)
        )
    return model.to(device, dtype).eval()


def x_field(*, width: int = WIDTH, **more: Any) -> Field:
    return Field("x", torch.float32, (width,), **more)


def key(size: int, mode: GraphMode = GraphMode.FULL) -> GraphKey:
    """One token per request; a piecewise graph serves any query length."""
    full = mode is GraphMode.FULL
    return GraphKey(mode, BatchDescriptor.decode(size) if full else BatchDescriptor(size, size))


def make_runner(
    device: torch.device,
    step: Callable[..., Any],
    sizes: Sequence[int],
    *,
    fields: Sequence[Field] | None = None,
    mode: GraphMode = GraphMode.FULL,
    capture: bool = True,
    **settings: Any,
) -> CudaGraphRunner:
    """A runner with one decode graph per size, captured unless told otherwise."""
    buffers = InputBuffers(fields or [x_field()], max_tokens=max(sizes), device=device)
    # One garbage collection per capture would be half the time of the suite.
    settings.setdefault("options", CaptureOptions(freeze_gc=False))
    runner = CudaGraphRunner(
        step, buffers, [key(size, mode) for size in sizes], dispatcher=Dispatcher(mode), **settings
    )
    if capture:
        runner.capture(progress=False)
        assert not runner.failures, runner.failures
    return runner


def wrap(function: Callable[..., Any], ladder: Sequence[int] = (2, 4), **settings: Any) -> Any:
    """`graphed`, without a garbage collection per capture."""
    settings.setdefault("options", CaptureOptions(freeze_gc=False))
    return graphed(function, ladder=list(ladder), **settings)


def strictly() -> CaptureOptions:
    """Options under which a failed capture raises."""
    return CaptureOptions(freeze_gc=False, strict=True)


def reasons(f: Any) -> dict[str, int]:
    """Why calls of a wrapper, or steps of a runner, ran eagerly."""
    return dict(f.report().eager_steps)


def padded(x: torch.Tensor, rows: int, pad: float = 0, dim: int = 0) -> torch.Tensor:
    """The batch as a rung of `rows` sees it."""
    shape = list(x.shape)
    shape[dim] = rows - x.size(dim)
    return torch.cat([x, torch.full(shape, pad, dtype=x.dtype, device=x.device)], dim)


def copies(tree: Any) -> Any:
    return tree_map(lambda leaf: leaf.clone() if isinstance(leaf, torch.Tensor) else leaf, tree)


def same(left: Any, right: Any) -> bool:
    """Bitwise equality of pytrees, NaN equal to itself."""
    a_leaves, b_leaves = tree_leaves(left), tree_leaves(right)
    if len(a_leaves) != len(b_leaves):
        return False
    for a, b in zip(a_leaves, b_leaves, strict=True):
        if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor):
            if type(a) is not type(b) or a != b:
                return False
        elif a.dtype != b.dtype or a.shape != b.shape or not _same_values(a, b):
            return False
    return True


def _same_values(a: torch.Tensor, b: torch.Tensor) -> bool:
    return bool(((a == b) | ((a != a) & (b != b))).all())


def close(left: Any, right: Any, tolerance: float = 1e-5) -> bool:
    """Equality up to what another batch shape may change."""
    pairs = zip(tree_leaves(left), tree_leaves(right), strict=True)
    return all(a.shape == b.shape and torch.allclose(a, b, rtol=tolerance, atol=tolerance) for a, b in pairs)


def eager_padded(runner: CudaGraphRunner, batch: dict[str, Any], shape: BatchShape | None = None) -> Any:
    """The eager step at the padded shape the runner would choose, without touching its buffers."""
    shape = shape or runner.buffers.shape_of(batch)
    descriptor = runner.decide(shape).descriptor
    assert descriptor is not None
    twin = InputBuffers(
        runner.buffers.fields,
        max_tokens=descriptor.num_tokens,
        max_reqs=descriptor.num_reqs,
        device=runner.buffers.device,
    )
    twin.fill(batch, shape, descriptor)
    with torch.no_grad():
        return runner.step(**twin.views(descriptor))


class _Counting(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def emit(self, record: logging.LogRecord) -> None:
        self.calls += 1


class PythonRuns:
    """Counts how often Python passes a line, where no replay counts as well: nobody looks into a logger."""

    def __init__(self) -> None:
        self._log = logging.Logger("runs")
        self._log.addHandler(_Counting())

    def add(self) -> None:
        self._log.warning("")

    @property
    def calls(self) -> int:
        return self._log.handlers[0].calls

    @calls.setter
    def calls(self, calls: int) -> None:
        self._log.handlers[0].calls = calls


class CallCounter(PythonRuns):
    """A step that counts how often Python runs it."""

    def __init__(self, step: Callable[..., Any]) -> None:
        super().__init__()
        self.step = step

    def __call__(self, *args: Any, **inputs: Any) -> Any:
        self.add()
        return self.step(*args, **inputs)


def rng_state(device: torch.device) -> torch.Tensor:
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


@contextmanager
def unchanged(*tensors: torch.Tensor, rng: torch.device | None = None) -> Iterator[None]:
    """Assert that these tensors, and a device's random generator, hold the same values afterwards."""
    before = [tensor.clone() for tensor in tensors]
    rng_before = rng_state(rng) if rng is not None else None
    yield
    assert rng is None or same(rng_state(rng), rng_before), "the random generator was advanced"
    for tensor, saved in zip(tensors, before, strict=True):
        assert same(tensor, saved), "a tensor was changed that should have been left alone"
