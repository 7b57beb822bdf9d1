"""Serving loops: slots, caches handed over in every form, buffers returned, work shared between wrappers."""

import collections
import dataclasses

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from corpus.registry import World, program


def decoder(world, width=4):
    return nn.Linear(width, 3 * width).to(world.device)


def attend(q, k, v, seen):
    scores = (k @ q[..., None]).squeeze(-1)
    mask = torch.arange(k.shape[1], device=q.device) <= seen[:, None]
    return (scores.masked_fill(~mask, -torch.inf).softmax(-1)[..., None] * v).sum(1)


@program(
    "cache in a dictionary argument, written by the step", tags=["serving", "cache", "arguments-changed"]
)
def cache_dictionary(world: World):
    proj = decoder(world)

    @torch.inference_mode()
    def step(x, cache, position):
        q, k, v = proj(x).chunk(3, -1)
        rows = torch.arange(x.shape[0], device=x.device)
        cache["k"][rows, position] = k
        cache["v"][rows, position] = v
        return attend(q, cache["k"], cache["v"], position)

    f = world.graphed(step, ladder=[1, 2, 4])
    for n in (3, 4):
        cache = {name: torch.zeros(n, 5, 4, device=world.device) for name in "kv"}
        world.watch(cache)
        x = world.randn(n, 4)
        for i in range(4):
            x = f(x, cache, torch.full((n,), i, device=world.device))
            yield x
    fresh = {name: torch.zeros(n, 5, 4, device=world.device) for name in "kv"}
    world.diagnose(f, x, fresh, torch.zeros(n, dtype=torch.int64, device=world.device))


@program("cache as a list of pairs, one for each layer", tags=["serving", "cache", "arguments-changed"])
def cache_pairs(world: World):
    layers = nn.ModuleList(decoder(world) for _ in range(2))

    @torch.no_grad()
    def step(x, caches, position):
        rows = torch.arange(len(x), device=x.device)
        for layer, (keys, values) in zip(layers, caches, strict=True):
            q, k, v = layer(x).chunk(3, -1)
            keys[rows, position], values[rows, position] = k, v
            x = x + attend(q, keys, values, position)
        return x

    f = world.graphed(step, ladder=[1, 2, 4])
    n = 2
    caches = [tuple(torch.zeros(n, 4, 4, device=world.device) for _ in "kv") for _ in range(2)]
    for i in range(4):
        yield f(world.randn(n, 4), caches, torch.full((n,), i, device=world.device))
    yield caches
    world.diagnose(f, world.randn(n, 4), caches, torch.zeros(n, dtype=torch.int64, device=world.device))


@program(
    "cache sliced to the running requests: cache[:n] is written",
    tags=["serving", "cache", "arguments-changed"],
)
def cache_slice(world: World):
    proj = decoder(world)

    @torch.no_grad()
    def step(x, keys, values, position):
        q, k, v = proj(x).chunk(3, -1)
        keys.scatter_(1, position[:, None, None].expand(-1, 1, 4), k[:, None])
        values.scatter_(1, position[:, None, None].expand(-1, 1, 4), v[:, None])
        return attend(q, keys, values, position)

    f = world.graphed(step, ladder=[1, 2, 4])
    keys, values = torch.zeros(6, 5, 4, device=world.device), torch.zeros(6, 5, 4, device=world.device)
    world.watch(keys, values)
    for i, n in enumerate((3, 4, 2, 1)):
        yield f(world.randn(n, 4), keys[:n], values[:n], torch.full((n,), i, device=world.device))
    x, zero = world.randn(2, 4), torch.zeros(2, dtype=torch.int64, device=world.device)
    world.diagnose(f, x, keys[:2].clone(), values[:2].clone(), zero)


@program("continuous batching: requests join and leave", tags=["serving", "cache", "state"])
def continuous_batching(world: World):
    class Engine(nn.Module):
        def __init__(self, slots=5, length=8, width=4, vocabulary=11):
            super().__init__()
            self.emb, self.proj = nn.Embedding(vocabulary, width), nn.Linear(width, 3 * width)
            self.head = nn.Linear(width, vocabulary)
            self.register_buffer("keys", torch.zeros(slots, length, width))
            self.register_buffer("values", torch.zeros(slots, length, width))

        def forward(self, tokens, slots, positions):
            q, k, v = self.proj(self.emb(tokens)).chunk(3, -1)
            self.keys[slots, positions], self.values[slots, positions] = k, v
            return self.head(attend(q, self.keys[slots], self.values[slots], positions)).argmax(-1)

    engine = Engine().to(world.device)
    f = world.graphed(engine, watch=False, ladder=[1, 2, 4], pads={"slots": 4})
    waiting, running, free = collections.deque(range(6)), {}, [0, 1, 2, 3]
    with torch.inference_mode():
        while waiting or running:
            while waiting and free:
                name = waiting.popleft()
                running[name] = [free.pop(0), 0, [name + 1]]
            columns = [
                [r[2][-1] for r in running.values()],
                [r[0] for r in running.values()],
                [r[1] for r in running.values()],
            ]
            tokens = f(*(torch.tensor(c, device=world.device) for c in columns)).tolist()
            for (name, request), token in zip(list(running.items()), tokens, strict=True):
                request[2].append(token)
                request[1] += 1
                if request[1] == 3 + name % 3:
                    free.append(running.pop(name)[0])
                    yield name, request[2]
    ids = torch.arange(2, device=world.device)
    world.diagnose(f, ids, ids, ids)


@program("buffer returned as the result, kept by the caller", tags=["serving", "state", "aliasing"])
def buffer_returned(world: World):
    class Memory(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("h", torch.zeros(4, 3))

        def forward(self, x):
            self.h.mul_(0.5).add_(x)
            return self.h

    f = world.graphed(Memory().to(world.device), ladder=[4])
    states = []
    for _ in range(3):
        states.append(f(world.randn(4, 3)))
    yield states
    world.diagnose(f, world.randn(4, 3))


@program("view of a buffer returned", tags=["serving", "state", "aliasing"])
def buffer_view(world: World):
    class Memory(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("log", torch.zeros(6, 3))
            self.register_buffer("at", torch.zeros(1, dtype=torch.int64))

        def forward(self, x):
            self.log.index_copy_(0, self.at, x.mean(0, keepdim=True))
            self.at.add_(1)
            return self.log[:2], x

    f = world.graphed(Memory().to(world.device), ladder=[2])
    for _ in range(4):
        yield f(world.randn(2, 3))
    world.diagnose(f, world.randn(2, 3))


@program("output tensor handed over, filled by the function", tags=["serving", "arguments-changed"])
def out_argument(world: World):
    lin = nn.Linear(3, 2).to(world.device)

    @torch.no_grad()
    def run(x, out):
        out.copy_(lin(x))

    f = world.graphed(run, ladder=[1, 2, 4])
    whole = torch.full((9, 2), -1.0, device=world.device)
    world.watch(whole)
    for begin, end in ((0, 3), (3, 7), (7, 9)):
        yield f(world.randn(end - begin, 3), whole[begin:end])
    world.diagnose(f, world.randn(3, 3), whole[:3].clone())


@program("numpy memory behind the argument", tags=["serving", "numpy", "arguments-changed"])
def numpy_memory(world: World):
    def scale(x):
        x *= 2
        return x.sum(-1)

    f = world.graphed(scale, ladder=[1, 2, 4])
    for n in (3, 4):
        array = np.arange(n * 2, dtype=np.float32).reshape(n, 2)
        yield f(torch.from_numpy(array)), array
    world.diagnose(f, world.randn(3, 2))


@program(
    "hidden state written in place and returned as well", tags=["serving", "recurrent", "arguments-changed"]
)
def state_in_place(world: World):
    cell = nn.GRUCell(3, 4).to(world.device)

    @torch.no_grad()
    def step(x, h):
        h.copy_(cell(x, h))
        return h

    f = world.graphed(step, ladder=[1, 2, 4])
    for n in (3, 2):
        h = torch.zeros(n, 4, device=world.device)
        for _ in range(3):
            out = f(world.randn(n, 3), h)
            yield out is h, out, h
    world.diagnose(f, world.randn(2, 3), torch.zeros(2, 4, device=world.device))


@program("state dictionary passed in, a new one returned", tags=["serving", "feedback", "structures"])
def functional_state(world: World):
    lin = nn.Linear(4, 4).to(world.device)

    @torch.no_grad()
    def step(state, x):
        h = (lin(x) + state["h"]).tanh()
        return {"h": h, "steps": state["steps"] + 1}, h.sum(-1)

    f = world.graphed(step, ladder=[1, 2, 4])
    for n in (3, 4):
        state = {"h": torch.zeros(n, 4, device=world.device), "steps": torch.zeros(n, device=world.device)}
        history = []
        for _ in range(4):
            state, y = f(state, world.randn(n, 4))
            history.append((state, y))
        yield history
    world.diagnose(f, state, world.randn(4, 4))


@program("state dictionary updated by the function", tags=["serving", "feedback", "arguments-changed"])
def state_updated(world: World):
    lin = nn.Linear(4, 4).to(world.device)

    @torch.no_grad()
    def step(state, x):
        state["h"] = (lin(x) + state["h"]).tanh()
        return state["h"].sum(-1)

    f = world.graphed(step, ladder=[1, 2, 4])
    state = {"h": torch.zeros(3, 4, device=world.device)}
    world.watch(state)
    for _ in range(4):
        yield f(state, world.randn(3, 4))
    world.diagnose(f, {"h": world.randn(3, 4)}, world.randn(3, 4))


@program("dataclass state replaced with dataclasses.replace", tags=["serving", "feedback", "structures"])
def replaced_dataclass(world: World):
    @dataclasses.dataclass
    class State:
        mean: torch.Tensor
        steps: torch.Tensor
        decay: float = 0.9

    def step(state, x):
        mean = state.decay * state.mean + (1 - state.decay) * x
        return dataclasses.replace(state, mean=mean, steps=state.steps + 1), x - mean

    f = world.graphed(step, ladder=[1, 2, 4])
    state = State(torch.zeros(3, 2, device=world.device), torch.zeros(3, device=world.device))
    for _ in range(3):
        state, y = f(state, world.randn(3, 2))
        yield state.mean, state.steps, y
    state.decay = 0.5
    yield f(state, world.randn(3, 2))[1]
    world.diagnose(f, state, world.randn(3, 2))


@program("prefill with one wrapper, decode with another, one cache", tags=["serving", "cache", "modules"])
def prefill_decode(world: World):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.proj = nn.Linear(4, 12)
            self.register_buffer("keys", torch.zeros(5, 6, 4))
            self.register_buffer("values", torch.zeros(5, 6, 4))

        def prefill(self, x, slots):
            q, k, v = self.proj(x).chunk(3, -1)
            self.keys[slots, : x.shape[1]], self.values[slots, : x.shape[1]] = k, v
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)[:, -1]

        def decode(self, x, slots, positions):
            q, k, v = self.proj(x).chunk(3, -1)
            self.keys[slots, positions], self.values[slots, positions] = k, v
            return attend(q, self.keys[slots], self.values[slots], positions)

    model = Model().to(world.device)
    prefill = world.graphed(model.prefill, ladder=[1, 2, 4], pads={"slots": 4})
    decode = world.graphed(model.decode, ladder=[1, 2, 4], pads={"slots": 4})
    with torch.no_grad():
        slots = torch.tensor([2, 0, 3], device=world.device)
        x = prefill(world.randn(3, 3, 4), slots)
        for position in (3, 4, 5):
            x = decode(x, slots, torch.full_like(slots, position))
            yield x
        yield model.keys[:4]
    world.diagnose(decode, world.randn(3, 4), slots, torch.zeros_like(slots))


@program("two models in a cascade, only uncertain rows go on", tags=["serving", "results-kept"])
def cascade(world: World):
    small = world.graphed(nn.Linear(4, 3).to(world.device), ladder=[1, 2, 4, 8])
    large = world.graphed(
        nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 3)).to(world.device), ladder=[1, 2, 4, 8]
    )
    with torch.inference_mode():
        for n in (8, 5, 3):
            x = world.randn(n, 4)
            p = small(x).softmax(-1)
            unsure = p.max(-1).values < 0.5
            if unsure.any():
                p[unsure] = large(x[unsure]).softmax(-1)
            yield p
    world.diagnose(small, x)


@program("draft and target model, accepted tokens", tags=["serving", "generation"])
def speculation(world: World):
    def lm():
        return nn.Sequential(nn.Embedding(7, 8), nn.Linear(8, 7)).to(world.device)

    draft, target = world.graphed(lm(), ladder=[1, 2, 4]), world.graphed(lm(), ladder=[1, 2, 4])
    with torch.no_grad():
        tokens = world.randint(7, 2, 1)
        for _ in range(4):
            proposal = [tokens[:, -1:]]
            for _ in range(2):
                proposal.append(draft(proposal[-1]).argmax(-1))
            proposal = torch.cat(proposal[1:], 1)
            checked = target(torch.cat([tokens[:, -1:], proposal], 1)).argmax(-1)
            same = (checked[:, :-1] == proposal).long().cumprod(1).sum(1).min().item()
            tokens = torch.cat([tokens, checked[:, : same + 1]], 1)
        yield tokens
    world.diagnose(draft, world.randint(7, 2, 1))


@program("mask built on the host for every call", tags=["serving", "attention"])
def host_mask(world: World):
    attention = nn.MultiheadAttention(4, 1, batch_first=True).to(world.device).eval()
    f = world.graphed(
        lambda x, mask: attention(x, x, x, key_padding_mask=mask, need_weights=False)[0], ladder=[1, 2, 4]
    )
    with torch.inference_mode():
        for lengths in ([3, 5], [2], [5, 1, 4]):
            mask = torch.tensor([[i >= length for i in range(5)] for length in lengths], device=world.device)
            yield f(world.randn(len(lengths), 5, 4), mask).masked_fill(mask[..., None], 0)
    world.diagnose(f, world.randn(3, 5, 4), mask)


@program("padded to a bucket of lengths by the caller", tags=["serving", "signatures"])
def length_buckets(world: World):
    emb = nn.Embedding(9, 4, padding_idx=0).to(world.device)
    f = world.graphed(lambda ids: emb(ids).sum(1), ladder=[1, 2, 4])
    with torch.no_grad():
        if world.graphs:
            for bucket in (4, 8):
                f.capture(torch.zeros(2, bucket, dtype=torch.int64, device=world.device))
        for n, length in ((3, 3), (2, 6), (4, 8), (1, 2)):
            ids = world.randint(8, n, length) + 1
            yield f(F.pad(ids, (0, (4 if length <= 4 else 8) - length)))
    world.diagnose(f, torch.ones(2, 4, dtype=torch.int64, device=world.device))


@program("captured ahead of time, then served", tags=["serving"])
def captured_ahead(world: World):
    f = world.graphed(
        nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)).to(world.device).eval(), ladder=[1, 2, 4]
    )
    with torch.inference_mode():
        if world.graphs:
            f.capture(torch.zeros(1, 4, device=world.device))
        yield [f(world.randn(n, 4)) for n in (1, 3, 4, 2)]
    world.diagnose(f, world.randn(3, 4))


@program("warm-up by calls with zeros of every size", tags=["serving"])
def warm_up(world: World):
    f = world.graphed(
        nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)).to(world.device).eval(), ladder=[1, 2, 4]
    )
    with torch.inference_mode():
        for n in (4, 2, 1):
            f(torch.zeros(n, 4, device=world.device))
        yield [f(world.randn(n, 4)) for n in (1, 3, 4, 2)]
    world.diagnose(f, world.randn(3, 4))


@program("warm-up with zeros, then a model whose rows mix", tags=["serving", "batch-dependent"])
def warm_up_mixing(world: World):
    f = world.graphed(lambda x: x - x.mean(0, keepdim=True), ladder=[2, 4])
    for n in (4, 2):
        f(torch.zeros(n, 3, device=world.device))
    yield [f(world.randn(n, 3)) for n in (3, 4, 2)]
    world.diagnose(f, world.randn(3, 3))


@program("warm-up with ones, then contrastive scores", tags=["serving", "batch-dependent"])
def warm_up_contrastive(world: World):
    def scores(a, b):
        return (F.normalize(a, dim=-1) @ F.normalize(b, dim=-1).T).softmax(-1).diagonal()

    f = world.graphed(scores, ladder=[2, 4])
    f(torch.ones(4, 3, device=world.device), torch.ones(4, 3, device=world.device))
    yield [f(world.randn(n, 3), world.randn(n, 3)) for n in (3, 4, 2)]
    world.diagnose(f, world.randn(3, 3), world.randn(3, 3))


@program("segment means over sorted segment ids", tags=["serving", "batch-dependent"])
def segments(world: World):
    def means(x, segment):
        total = torch.zeros(4, x.shape[1], device=x.device).index_add(0, segment, x)
        count = torch.zeros(4, device=x.device).index_add(0, segment, torch.ones_like(x[:, 0]))
        return (total / count.clamp(min=1)[:, None])[segment]

    f = world.graphed(means, ladder=[4, 8])
    for n in (8, 6, 5):
        yield f(world.randn(n, 2), (torch.arange(n, device=world.device) // 2))
    world.diagnose(f, world.randn(6, 2), torch.arange(6, device=world.device) // 2)


@program("rows sorted, processed and put back", tags=["serving", "batch-dependent"])
def sorted_rows(world: World):
    lin = nn.Linear(3, 3).to(world.device)

    @torch.no_grad()
    def run(x, key):
        order = key.argsort()
        y = lin(x[order]).relu()
        return torch.empty_like(y).index_copy_(0, order, y)

    f = world.graphed(run, ladder=[2, 4, 8])
    for n in (5, 8, 3):
        yield f(world.randn(n, 3), world.randn(n))
    world.diagnose(f, world.randn(3, 3), world.randn(3))


@program("neighbouring rows compared (deduplication)", tags=["serving", "batch-dependent"])
def neighbours(world: World):
    def is_new(ids):
        return torch.cat([torch.ones_like(ids[:1], dtype=torch.bool), ids[1:] != ids[:-1]])

    f = world.graphed(is_new, ladder=[4, 8])
    for n in (6, 8, 4):
        yield f(world.randint(3, n))
    world.diagnose(f, world.randint(3, 6))


@program("index of the best row of the batch", tags=["serving", "batch-dependent"])
def best_row(world: World):
    net = nn.Linear(3, 1).to(world.device)

    @torch.no_grad()
    def best(x):
        score = net(x).squeeze(-1)
        return score, score.argmax(), score.max()

    f = world.graphed(best, ladder=[4, 8])
    for n in (8, 5, 6):
        yield f(world.randn(n, 3))
        yield f(world.randn(n, 3) - 3)
    world.diagnose(f, world.randn(5, 3))


@program("any and all over the batch", tags=["serving", "batch-dependent"])
def any_all(world: World):
    f = world.graphed(lambda done, x: (done.all(), done.any(), x * ~done), ladder=[2, 4])
    for n in (3, 4, 2):
        yield f(torch.ones(n, dtype=torch.bool, device=world.device), world.randn(n))
        yield f(world.randint(2, n).bool(), world.randn(n))
    world.diagnose(f, world.randint(2, 3).bool(), world.randn(3))


@program("number of valid rows counted by a mask argument", tags=["serving", "batch-dependent"])
def valid_rows(world: World):
    def mean(x, valid):
        return (x * valid[:, None]).sum(0) / valid.sum().clamp(min=1)

    f = world.graphed(mean, ladder=[4, 8])
    for n in (8, 5, 6):
        yield f(world.randn(n, 3), torch.ones(n, device=world.device))
    world.diagnose(f, world.randn(5, 3), torch.ones(5, device=world.device))


@program("seeded by request: a generator for each call", tags=["serving", "random"])
def seeded(world: World):
    head = nn.Linear(4, 50).to(world.device)

    def sample(x):
        return torch.multinomial(head(x).softmax(-1), 1)

    f = world.graphed(sample, ladder=[1])
    with torch.no_grad():
        x = world.randn(1, 4)
        for seed in (1, 2, 1, 3, 1):
            torch.manual_seed(seed)
            yield f(x)
    world.diagnose(f, x)


@program("metrics of requests: totals kept in Python around the calls", tags=["serving", "python-state"])
def totals(world: World):
    f = world.graphed(nn.Linear(4, 2).to(world.device), ladder=[1, 2, 4])
    seen = collections.Counter()
    with torch.no_grad():
        for n in (3, 4, 2):
            labels = f(world.randn(n, 4)).argmax(-1)
            seen.update(labels.tolist())
    yield dict(sorted(seen.items()))
    world.diagnose(f, world.randn(3, 4))


@program("adapters chosen by name, weights in a dictionary", tags=["serving", "changes"])
def adapters(world: World):
    base = nn.Linear(4, 4).to(world.device)
    weights = {name: torch.randn(4, 4, device=world.device) * 0.1 for name in ("en", "de")}

    def run(x, adapter="en"):
        return base(x) + x @ weights[adapter]

    f = world.graphed(run, ladder=[1, 2, 4])
    x = world.randn(3, 4)
    with torch.no_grad():
        for name in ("en", "de", "en"):
            yield f(x, adapter=name)
        weights["fr"] = torch.randn(4, 4, device=world.device)
        yield f(x, adapter="fr")
        weights["en"].zero_()
        yield f(x, adapter="en")
    world.diagnose(f, x, adapter="en")


@program("adapter index for each row", tags=["serving", "routing"])
def adapter_rows(world: World):
    class Lora(nn.Module):
        def __init__(self):
            super().__init__()
            self.base = nn.Linear(4, 4)
            self.A, self.B = nn.Parameter(torch.randn(3, 4, 2)), nn.Parameter(torch.randn(3, 2, 4))

        def forward(self, x, adapter):
            return self.base(x) + (x[:, None] @ self.A[adapter] @ self.B[adapter])[:, 0]

    f = world.graphed(Lora().to(world.device), ladder=[1, 2, 4])
    with torch.no_grad():
        for n in (3, 4, 1):
            yield f(world.randn(n, 4), world.randint(3, n))
    world.diagnose(f, world.randn(3, 4), world.randint(3, 3))


@program("weights swapped by data pointer exchange (.data =)", tags=["serving", "changes"])
def data_swap(world: World):
    model = nn.Linear(4, 2).to(world.device)
    f = world.graphed(model, ladder=[1, 2, 4])
    x = world.randn(3, 4)
    with torch.no_grad():
        yield f(x)
        model.weight.data.copy_(torch.ones(2, 4))
        yield f(x)
        model.weight.data = torch.zeros(2, 4, device=world.device)
        world.attempt(lambda: f(x))
    world.diagnose(f, x)


@program("model moved to the CPU and back between requests", tags=["serving", "changes"])
def moved(world: World):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)).to(world.device)
    f = world.graphed(model, ladder=[1, 2, 4])
    x = world.randn(3, 4)
    with torch.no_grad():
        yield f(x)
        model.cpu()
        model.to(world.device)
        yield f(x)
    world.diagnose(f, x)
