"""Capture and replay through `torch.cuda.CUDAGraph`."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import torch

from ..burials import burials_postponed, bury_later
from ..current_stream import CurrentStream
from ..memory import weak_alias
from ..options import CaptureOptions
from ..trees import map_tensors
from .cold_kernels import refuse_cold_kernels
from .pool_segments import PoolSegments
from .protocol import Kept, PoolMemory, Recording, Session


class Graph(torch.cuda.CUDAGraph):
    """A graph that may be collected at any time."""

    def __del__(self) -> None:
        bury_later(self)


class CudaMemory:
    """A private pool of the caching allocator.

    The allocator drops a pool with its last graph; an anchor, a graph of one node that is never replayed,
    keeps it, so that graphs may come and go. A failed capture leaves its pool unusable for further ones
    (torch's allocator of pinned memory believes the capture to go on): the next capture gets a new pool,
    and the old one lives on for the graphs that are in it.
    """

    def __init__(self, device: torch.device, stream: torch.cuda.Stream, new_pool: Callable[[], Any]) -> None:
        self._new_pool = new_pool
        self._token = torch.zeros(1, device=device)
        self._stream = stream
        self._ids: list[Any] = []
        self._anchors: list[Graph] = []
        self._segments = PoolSegments(device)
        self._bytes: int | None = None
        self.renew()

    @property
    def id(self) -> Any:
        """The pool that captures go to."""
        return self._ids[-1]

    def renew(self) -> None:
        """Send further captures to a new pool."""
        pool, anchor = self._new_pool(), Graph()
        with _on(self._stream):
            anchor.capture_begin(pool=pool, capture_error_mode="thread_local")
            self._token.zero_()
            anchor.capture_end()
        self._ids.append(pool)
        self._anchors.append(anchor)
        self._segments.add(pool)
        self.recount()

    @property
    def bytes(self) -> int:
        if self._bytes is None:
            self._bytes = self._segments.bytes
        return self._bytes

    def recount(self) -> None:
        """A capture may have changed the pool. Nothing else does, so nothing else needs to be asked."""
        self._bytes = None

    def contains(self, address: int) -> bool:
        """Whether an address lies in this pool."""
        return self._segments.contains(address)


class CudaSession:
    """A capture in progress on the backend's stream.

    Works on `capture_begin`/`capture_end` directly: `torch.cuda.graph` synchronises and empties the
    allocator's cache around every graph, which over dozens of small ones is much of the capture time.
    """

    def __init__(self, backend: "CudaBackend", memory: CudaMemory, options: CaptureOptions) -> None:
        self._backend = backend
        self._memory = memory
        self._options = options
        self._graphs: list[torch.cuda.CUDAGraph] = []
        self._nodes: int | None = 0
        self._open = False
        self._context = ExitStack()

    def begin(self) -> None:
        self._context.enter_context(self._backend.stream())
        self._context.enter_context(refuse_cold_kernels())
        self._context.enter_context(burials_postponed())
        self.resume()

    def resume(self) -> None:
        graph = Graph(keep_graph=self._options.keep_graph)
        for generator in self._options.generators:
            graph.register_generator_state(generator)
        self._graphs.append(graph)
        self._open = True
        self._memory.recount()
        graph.capture_begin(pool=self._memory.id, capture_error_mode=self._options.error_mode)

    def pause(self) -> None:
        self._close()
        self._graphs[-1].replay()  # an eager call comes next and must read real values

    def keep(self, tree: Any) -> Kept:
        def keep_one(tensor: torch.Tensor) -> torch.Tensor:
            pooled = tensor.is_cuda and self._memory.contains(tensor.data_ptr())
            return weak_alias(tensor) if pooled else tensor.detach()

        return Kept(map_tensors(keep_one, tree))

    def finish(self) -> Recording:
        self._close()
        self._context.close()
        recording = Recording(tuple(self._graphs), self._nodes)
        if self._options.keep_graph:
            recording.raw = [graph.raw_cuda_graph() for graph in self._graphs]
        return recording

    def abort(self) -> None:
        try:
            if self._open:
                self._open = False
                self._end_capture()
        except RuntimeError:
            self._backend.heal_after_failed_capture(self._memory)
        finally:
            self._graphs.clear()
            self._context.close()

    def _close(self) -> None:
        counted = _nodes_being_captured(self._backend.own_stream)
        self._nodes = None if counted is None or self._nodes is None else self._nodes + counted
        self._end_capture()
        self._open = False
        if self._options.keep_graph:
            self._graphs[-1].instantiate()

    def _end_capture(self) -> None:
        with warnings.catch_warnings():
            # An empty segment is normal: a step may begin or end with an eager boundary, or fail at once.
            warnings.filterwarnings("ignore", message="The CUDA Graph is empty")
            self._graphs[-1].capture_end()
        self._memory.recount()


class CudaBackend:
    """Owns the device's dedicated stream and the order of replays."""

    name = "cuda"

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.own_stream = torch.cuda.Stream(device)
        self._current = CurrentStream(device)
        self._last_stream: torch.cuda.Stream | None = None

    def new_memory(self, source: Any = None) -> CudaMemory:
        new_pool = torch.cuda.graph_pool_handle if source is None else source.graph_pool
        return CudaMemory(self.device, self.own_stream, new_pool)

    def session(self, memory: PoolMemory, options: CaptureOptions) -> Session:
        assert isinstance(memory, CudaMemory)
        return CudaSession(self, memory, options)

    @contextmanager
    def stream(self) -> Iterator[None]:
        with _on(self.own_stream):
            self.order_replays()
            yield

    def release_unused(self) -> None:
        torch.cuda.synchronize(self.device)
        torch.cuda.empty_cache()

    def rng_state(self) -> torch.Tensor:
        return torch.cuda.get_rng_state(self.device)

    def set_rng_state(self, state: torch.Tensor) -> None:
        torch.cuda.set_rng_state(state, self.device)

    def order_replays(self) -> None:
        current = self._current.get()
        if current is self._last_stream:
            return
        if self._last_stream is not None:
            current.wait_stream(self._last_stream)
        self._last_stream = current

    def heal_after_failed_capture(self, memory: CudaMemory) -> None:
        """Undo what an invalidated capture leaves behind in torch.

        `capture_end` raises before it tells the allocator and the random generator that the capture is
        over; from then on every random number on the device raises. A capture that succeeds resets the
        generator; the allocator is told directly.
        """
        with suppress(RuntimeError):
            torch._C._cuda_endAllocateToPool(self.device.index, memory.id)  # type: ignore[attr-defined]
        memory.renew()


@contextmanager
def _on(stream: torch.cuda.Stream) -> Iterator[None]:
    """Run on a stream, ordered after and before the work of the caller's stream."""
    caller = torch.cuda.current_stream(stream.device)
    if caller == stream:
        yield
        return
    stream.wait_stream(caller)
    try:
        with torch.cuda.stream(stream):
            yield
    finally:
        caller.wait_stream(stream)


def _nodes_being_captured(stream: torch.cuda.Stream) -> int | None:
    try:
        from cuda.bindings import driver
    except ImportError:
        return None
    answer = driver.cuStreamGetCaptureInfo(driver.CUstream(stream.cuda_stream))
    if int(answer[0]) != 0:
        return None
    counted = driver.cuGraphGetNodes(answer[3], 0)
    return int(counted[-1]) if int(counted[0]) == 0 else None
