"""Threads, queues and asyncio around wrapped modules."""

import asyncio
import queue
import threading
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import nn

from corpus.registry import World, program


def network(world):
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)).to(world.device).eval()


@program("a pool of threads, results held", tags=["threads"])
def pool_of_threads(world: World):
    f = world.graphed(network(world), ladder=[1, 2, 4])
    batches = [world.randn(n, 4) for n in (3, 1, 4, 2, 3, 4, 2, 1)]

    def predict(x):
        with torch.inference_mode():
            return f(x)

    with ThreadPoolExecutor(3) as pool:
        yield list(pool.map(predict, batches))
    world.diagnose(f, batches[0])


@program("a pool of threads after a first call", tags=["threads"])
def pool_not_declared(world: World):
    f = world.graphed(network(world), ladder=[1, 2, 4])
    batches = [world.randn(n, 4) for n in (3, 1, 4, 2)]

    def predict(x):
        with torch.inference_mode():
            return f(x).clone()

    yield predict(batches[0])
    with ThreadPoolExecutor(2) as pool:
        yield list(pool.map(predict, batches))


@program("one worker thread that owns the model", tags=["threads"])
def worker_thread(world: World):
    f = world.graphed(network(world), ladder=[1, 2, 4])
    work, done = queue.Queue(), queue.Queue()

    def serve():
        with torch.inference_mode():
            while (x := work.get()) is not None:
                done.put(f(x).clone())

    thread = threading.Thread(target=serve)
    thread.start()
    for n in (3, 1, 4):
        work.put(world.randn(n, 4))
    work.put(None)
    thread.join()
    yield [done.get() for _ in range(3)]


@program("model captured in the main thread, served in a worker", tags=["threads"])
def served_elsewhere(world: World):
    f = world.graphed(network(world), ladder=[1, 2, 4])
    with torch.no_grad():
        yield f(world.randn(2, 4)).clone()
    results = []

    def serve(x):
        with torch.no_grad():
            results.append(f(x))

    for n in (3, 4):
        thread = threading.Thread(target=serve, args=(world.randn(n, 4),))
        thread.start()
        thread.join()
    yield results
    world.diagnose(f, world.randn(3, 4))


@program("asyncio: a batcher in the event loop", tags=["asyncio", "results-kept"])
def event_loop(world: World):
    f = world.graphed(network(world), ladder=[1, 2, 4])

    async def main():
        pending, results = [], {}

        async def request(name, x):
            future = asyncio.get_running_loop().create_future()
            pending.append((x, future))
            results[name] = await future

        async def batcher():
            while len(results) < 6:
                await asyncio.sleep(0)
                batch, pending[:] = pending[:4], pending[4:]
                if batch:
                    with torch.inference_mode():
                        out = f(torch.stack([x for x, _ in batch]))
                    for row, (_, future) in zip(out, batch, strict=True):
                        future.set_result(row)

        await asyncio.gather(batcher(), *(request(i, world.randn(4)) for i in range(6)))
        return [results[i] for i in range(6)]

    yield torch.stack(asyncio.run(main()))
    world.diagnose(f, world.randn(3, 4))


@program("asyncio.to_thread for every call", tags=["asyncio", "threads"])
def to_thread(world: World):
    f = world.graphed(network(world), ladder=[1, 2, 4])

    def predict(x):
        with torch.inference_mode():
            return f(x).cpu()

    async def main():
        return await asyncio.gather(*(asyncio.to_thread(predict, world.randn(n, 4)) for n in (3, 2, 4, 1)))

    yield asyncio.run(main())
    world.diagnose(f, world.randn(3, 4))


@program("state in a buffer, calls from two threads in turns", tags=["threads", "state"])
def state_in_threads(world: World):
    class Counter(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("steps", torch.zeros(()))

        def forward(self, x):
            self.steps += 1
            return x * self.steps

    f = world.graphed(Counter().to(world.device), ladder=[2, 4])
    with ThreadPoolExecutor(2) as pool:
        for n in (3, 4, 2, 4):
            yield pool.submit(f, world.randn(n, 2)).result()
    yield f.steps.item()
    world.diagnose(f, world.randn(3, 2))


@program("prefetching thread fills tensors while the model runs", tags=["threads"])
def prefetch(world: World):
    f, ready = world.graphed(network(world), ladder=[4]), queue.Queue(2)
    batches = [world.randn(n, 4) for n in (4, 4, 3)]

    def load():
        for x in batches:
            ready.put(x * 2)
        ready.put(None)

    threading.Thread(target=load, daemon=True).start()
    with torch.no_grad():
        while (x := ready.get()) is not None:
            yield f(x).clone()
    world.diagnose(f, batches[0])


@program("an exception in one thread does not disturb the others", tags=["threads", "exceptions"])
def exception_in_thread(world: World):
    f = world.graphed(network(world), ladder=[1, 2, 4])

    def predict(x):
        try:
            with torch.no_grad():
                return f(x)
        except RuntimeError as error:
            return type(error).__name__

    with ThreadPoolExecutor(2) as pool:
        yield list(
            pool.map(predict, [world.randn(3, 4), world.randn(3, 5), world.randn(2, 4), world.randn(4, 4)])
        )
    world.diagnose(f, world.randn(3, 4))
