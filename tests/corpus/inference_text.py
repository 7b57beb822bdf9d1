"""Text: embeddings, recurrent networks, attention, caches, generation."""

import math
from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional as F

from corpus.registry import World, program


class Block(nn.Module):
    """Causal self-attention with a key-value cache that it is given."""

    def __init__(self, dim=16, heads=2):
        super().__init__()
        self.heads = heads
        self.ln1, self.ln2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))

    def attend(self, x, mask=None, past=None):
        B, T, C = x.shape
        q, k, v = (t.view(B, T, self.heads, -1).transpose(1, 2) for t in self.qkv(x).split(C, -1))
        if past is not None:
            k, v = torch.cat([past[0], k], 2), torch.cat([past[1], v], 2)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None and past is None)
        return self.out(y.transpose(1, 2).reshape(B, T, C)), (k, v)

    def forward(self, x, mask=None, past=None):
        y, now = self.attend(self.ln1(x), mask, past)
        x = x + y
        return x + self.mlp(self.ln2(x)), now


class GPT(nn.Module):
    """Two blocks over a vocabulary of 32."""

    def __init__(self, vocabulary=32, dim=16, layers=2, length=24):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocabulary, dim), nn.Embedding(length, dim)
        self.blocks = nn.ModuleList(Block(dim) for _ in range(layers))
        self.ln_f = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, vocabulary, bias=False)
        self.head.weight = self.wte.weight

    def forward(self, tokens, past=None):
        start = 0 if past is None else past[0][0].shape[2]
        x = self.wte(tokens) + self.wpe(torch.arange(start, start + tokens.shape[1], device=tokens.device))
        present = []
        for i, block in enumerate(self.blocks):
            x, now = block(x, past=None if past is None else past[i])
            present.append(now)
        return self.head(self.ln_f(x)), present


class StaticCache(nn.Module):
    """A decoder whose cache lies in buffers; slots are given."""

    def __init__(self, slots=9, length=12, dim=8, vocabulary=20):
        super().__init__()
        self.emb, self.qkv, self.out = (
            nn.Embedding(vocabulary, dim),
            nn.Linear(dim, 3 * dim),
            nn.Linear(dim, vocabulary),
        )
        self.register_buffer("k", torch.zeros(slots, length, dim))
        self.register_buffer("v", torch.zeros(slots, length, dim))

    def forward(self, tokens, positions, slots):
        q, k, v = self.qkv(self.emb(tokens)).chunk(3, -1)
        self.k[slots, positions] = k
        self.v[slots, positions] = v
        keys, values = self.k[slots], self.v[slots]
        scores = (keys @ q.unsqueeze(-1)).squeeze(-1) / math.sqrt(q.shape[-1])
        visible = torch.arange(keys.shape[1], device=q.device) <= positions[:, None]
        weights = scores.masked_fill(~visible, float("-inf")).softmax(-1)
        return self.out((weights.unsqueeze(1) @ values).squeeze(1))


@program("bag of words classifier with a padding index", tags=["text"])
def bag_of_words(world: World):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.emb, self.fc = nn.Embedding(30, 8, padding_idx=0), nn.Linear(8, 3)

        def forward(self, ids):
            mask = (ids != 0).unsqueeze(-1)
            mean = (self.emb(ids) * mask).sum(1) / mask.sum(1).clamp(min=1)
            return self.fc(mean)

    f = world.graphed(Model().to(world.device), ladder=[1, 2, 4, 8])
    with torch.no_grad():
        for n in (3, 8, 1, 6):
            yield f(world.randint(30, n, 7))
    world.diagnose(f, world.randint(30, 3, 7))


@program("embedding bag with offsets", tags=["text", "recommender"])
def embedding_bag_offsets(world: World):
    bag = nn.EmbeddingBag(30, 8, mode="mean").to(world.device)

    def classify(ids, offsets):
        return bag(ids, offsets).tanh()

    f = world.graphed(classify, ladder=[4, 8])
    for n in (8, 4):
        yield f(world.randint(30, n), torch.arange(0, n, 1, device=world.device))
        yield f(world.randint(30, n), torch.tensor([0, 2, 3], device=world.device))
    world.diagnose(f, world.randint(30, 4), torch.arange(4, device=world.device))


@program("lstm over whole sequences", tags=["text", "recurrent"])
def lstm(world: World):
    class Tagger(nn.Module):
        def __init__(self):
            super().__init__()
            self.emb = nn.Embedding(20, 6)
            self.lstm = nn.LSTM(6, 5, num_layers=2, batch_first=True, bidirectional=True)
            self.fc = nn.Linear(10, 3)

        def forward(self, ids):
            out, _ = self.lstm(self.emb(ids))
            return self.fc(out)

    f = world.graphed(Tagger().to(world.device).eval(), ladder=[1, 2, 4])
    with torch.no_grad():
        for n, length in ((2, 5), (3, 5), (1, 9), (4, 5)):
            yield f(world.randint(20, n, length))
    world.diagnose(f, world.randint(20, 3, 5))


@program("gru cell with the hidden state passed in and out", tags=["text", "recurrent", "feedback"])
def gru_cell(world: World):
    cell = nn.GRUCell(4, 6).to(world.device)
    f = world.graphed(cell, ladder=[1, 2, 4])
    with torch.no_grad():
        for n in (3, 4, 1):
            h = torch.zeros(n, 6, device=world.device)
            outputs = []
            for _ in range(4):
                h = f(world.randn(n, 4), h)
                outputs.append(h)
            yield torch.stack(outputs)
    world.diagnose(f, world.randn(3, 4), world.randn(3, 6))


@program("lstm with state (h, c) whose batch is its second dimension", tags=["text", "recurrent", "feedback"])
def lstm_state(world: World):
    lstm = nn.LSTM(4, 5, batch_first=True).to(world.device)

    def step(x, h, c):
        out, (h, c) = lstm(x, (h.transpose(0, 1).contiguous(), c.transpose(0, 1).contiguous()))
        return out[:, -1], h.transpose(0, 1), c.transpose(0, 1)

    f = world.graphed(step, ladder=[1, 2, 4])
    with torch.no_grad():
        for n in (2, 3):
            h = c = torch.zeros(n, 1, 5, device=world.device)
            for _ in range(3):
                out, h, c = f(world.randn(n, 1, 4), h, c)
                yield out
    world.diagnose(f, world.randn(3, 1, 4), world.randn(3, 1, 5), world.randn(3, 1, 5))


@program(
    "rnn that keeps its hidden state in an attribute", tags=["text", "recurrent", "state", "python-state"]
)
def rnn_attribute(world: World):
    class Streaming(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn, self.h = nn.RNNCell(3, 4), None

        def reset(self):
            self.h = None

        def forward(self, x):
            self.h = self.rnn(x, self.h)
            return self.h * 2

    model = Streaming().to(world.device)
    f = world.graphed(model, ladder=[1, 2, 4])
    with torch.no_grad():
        for n in (2, 4):
            for _ in range(3):
                yield f(world.randn(n, 3))
            f.reset()
    world.diagnose(f, world.randn(4, 3))


@program("rnn that keeps its hidden state in a buffer, in place", tags=["text", "recurrent", "state"])
def rnn_buffer(world: World):
    class Streaming(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn = nn.GRUCell(3, 4)
            self.register_buffer("h", torch.zeros(4, 4))

        def forward(self, x):
            self.h.copy_(self.rnn(x, self.h))
            return self.h.clone()

    f = world.graphed(Streaming().to(world.device), ladder=[4])
    with torch.no_grad():
        for i in range(5):
            if i == 3:
                f.h.zero_()
            yield f(world.randn(4, 3))
    world.diagnose(f, world.randn(4, 3))


@program("packed sequences", tags=["text", "recurrent", "host-values"])
def packed(world: World):
    gru = nn.GRU(4, 5, batch_first=True).to(world.device)

    def encode(x, lengths):
        p = nn.utils.rnn.pack_padded_sequence(x, lengths.cpu(), batch_first=True, enforce_sorted=False)
        out, _ = nn.utils.rnn.pad_packed_sequence(gru(p)[0], batch_first=True, total_length=x.shape[1])
        return out

    f = world.graphed(encode, ladder=[2, 4])
    with torch.no_grad():
        for n in (3, 4):
            yield f(world.randn(n, 6, 4), world.randint(6, n) + 1)
    world.diagnose(f, world.randn(3, 6, 4), world.randint(6, 3) + 1)


@program("masked attention with lengths", tags=["text", "attention"])
def masked_attention(world: World):
    attention = nn.MultiheadAttention(8, 2, batch_first=True).to(world.device).eval()

    def encode(x, lengths):
        padding = torch.arange(x.shape[1], device=x.device) >= lengths[:, None]
        out, weights = attention(x, x, x, key_padding_mask=padding, need_weights=True)
        return out.masked_fill(padding[..., None], 0), weights

    f = world.graphed(encode, ladder=[1, 2, 4], pads={"lengths": 1})
    with torch.no_grad():
        for n in (3, 4, 1):
            yield f(world.randn(n, 5, 8), world.randint(5, n) + 1)
    world.diagnose(f, world.randn(3, 5, 8), world.randint(5, 3) + 1)


@program("attention where an empty row gives NaN", tags=["text", "attention"])
def empty_rows(world: World):
    def attend(q, mask):
        scores = (q @ q.transpose(1, 2)).masked_fill(~mask[:, None, :], float("-inf"))
        return scores.softmax(-1) @ q

    f = world.graphed(attend, ladder=[1, 2, 4])
    for n in (2, 3):
        mask = world.randint(3, n, 4).bool()
        mask[0] = False
        yield f(world.randn(n, 4, 3), mask)
    world.diagnose(f, world.randn(3, 4, 3), world.randint(2, 3, 4).bool())


@program("transformer encoder with src_key_padding_mask", tags=["text", "attention"])
def encoder(world: World):
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    model = nn.TransformerEncoder(layer, 2).to(world.device).eval()
    f = world.graphed(model, ladder=[1, 2, 4])
    with torch.no_grad():
        for n in (3, 2, 4):
            mask = torch.zeros(n, 6, dtype=torch.bool, device=world.device)
            mask[:, 4:] = True
            yield f(world.randn(n, 6, 8), src_key_padding_mask=mask)[:, :4]
            yield f(world.randn(n, 6, 8))
    world.diagnose(f, world.randn(4, 6, 8), src_key_padding_mask=mask)


@program("nn.Transformer, encoder and decoder with a causal mask", tags=["text", "attention"])
def seq2seq(world: World):
    model = nn.Transformer(8, 2, 1, 1, 16, batch_first=True).to(world.device).eval()
    causal = nn.Transformer.generate_square_subsequent_mask(4, device=world.device)

    def run(source, target):
        return model(source, target, tgt_mask=causal, tgt_is_causal=True)

    f = world.graphed(run, ladder=[1, 2, 4])
    with torch.no_grad():
        for n in (2, 3):
            yield f(world.randn(n, 5, 8), world.randn(n, 4, 8))
    world.diagnose(f, world.randn(2, 5, 8), world.randn(2, 4, 8))


@program("greedy generation without a cache: the sequence grows", tags=["text", "generation", "signatures"])
def growing(world: World):
    model = GPT().to(world.device).eval()
    f = world.graphed(lambda tokens: model(tokens)[0][:, -1], ladder=[1, 2, 4])
    with torch.no_grad():
        tokens = world.randint(32, 3, 2)
        for _ in range(6):
            tokens = torch.cat([tokens, f(tokens).argmax(-1, keepdim=True)], 1)
        yield tokens
    world.diagnose(f, world.randint(32, 3, 2))


@program("greedy generation, cache as a list of tuples that grows", tags=["text", "generation", "cache"])
def cache_of_tuples(world: World):
    f = world.graphed(GPT().to(world.device).eval(), ladder=[1, 2, 4])
    with torch.no_grad():
        logits, past = f(world.randint(32, 3, 4))
        tokens = []
        for _ in range(5):
            token = logits[:, -1].argmax(-1, keepdim=True)
            tokens.append(token)
            logits, past = f(token, past)
        yield torch.cat(tokens, 1)
        yield past
    world.diagnose(f, world.randint(32, 3, 4))


@program("decoder with a static cache in buffers", tags=["text", "generation", "cache", "state"])
def static_cache(world: World):
    model = StaticCache().to(world.device).eval()
    f = world.graphed(model, watch=False, ladder=[1, 2, 4, 8], pads={"slots": 8})
    with torch.no_grad():
        tokens = world.randint(20, 3)
        slots = torch.tensor([0, 2, 5], device=world.device)
        for position in range(5):
            logits = f(tokens, torch.full_like(tokens, position), slots)
            tokens = logits.argmax(-1)
            yield tokens
        keep = torch.tensor([0, 2], device=world.device)
        yield f(tokens[keep], torch.full_like(keep, 5), slots[keep])
        yield model.k[:8].clone(), model.v[:8].clone()
    ids = torch.arange(3, device=world.device)
    world.diagnose(f, ids, ids, ids)


@program("cache as arguments, changed in place by the step", tags=["text", "cache", "arguments-changed"])
def cache_arguments(world: World):
    proj = nn.Linear(4, 8).to(world.device)

    def step(x, k_cache, v_cache, position):
        k, v = proj(x).chunk(2, -1)
        rows = torch.arange(len(x), device=x.device)
        k_cache[rows, position] = k
        v_cache[rows, position] = v
        scores = (k_cache * x[:, None]).sum(-1)
        return (scores.softmax(-1)[..., None] * v_cache).sum(1)

    f = world.graphed(step, ladder=[1, 2, 4])
    with torch.no_grad():
        for n in (3, 4):
            k, v = torch.zeros(n, 6, 4, device=world.device), torch.zeros(n, 6, 4, device=world.device)
            for i in range(3):
                yield f(world.randn(n, 4), k, v, torch.full((n,), i, device=world.device))
            yield k, v
    x = world.randn(2, 6, 4)
    world.diagnose(f, world.randn(2, 4), x, x.clone(), torch.zeros(2, dtype=torch.int64, device=world.device))


@program("cache as a list on the module, concatenated", tags=["text", "cache", "python-state"])
def cache_list(world: World):
    class Decoder(nn.Module):
        def __init__(self):
            super().__init__()
            self.kv = nn.Linear(4, 8)
            self.keys, self.values = [], []

        def forward(self, x):
            k, v = self.kv(x).chunk(2, -1)
            self.keys.append(k)
            self.values.append(v)
            keys, values = torch.stack(self.keys, 1), torch.stack(self.values, 1)
            return ((keys @ x[..., None]).softmax(1) * values).sum(1)

    f = world.graphed(Decoder().to(world.device), ladder=[2, 4])
    with torch.no_grad():
        for _ in range(4):
            yield f(world.randn(4, 4))
    world.diagnose(f, world.randn(4, 4))


@program("sliding window cache rolled in place", tags=["text", "cache", "state"])
def rolling_cache(world: World):
    class Window(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("window", torch.zeros(2, 5, 3))
            self.conv = nn.Conv1d(3, 2, 5)

        def forward(self, x):
            self.window.copy_(torch.cat([self.window[:, 1:], x[:, None]], 1))
            return self.conv(self.window.transpose(1, 2)).squeeze(-1)

    f = world.graphed(Window().to(world.device), ladder=[2])
    with torch.no_grad():
        for _ in range(7):
            yield f(world.randn(2, 3))
    world.diagnose(f, world.randn(2, 3))


@program("rotary embeddings with a cached table that grows", tags=["text", "attention", "python-state"])
def rotary(world: World):
    class Rotary(nn.Module):
        def __init__(self, dim=8):
            super().__init__()
            self.register_buffer(
                "inv_freq", 1.0 / (10000 ** (torch.arange(0, dim, 2) / dim)), persistent=False
            )
            self.seen, self.cos, self.sin = 0, None, None

        def forward(self, q):
            length = q.shape[1]
            if length > self.seen:
                angles = torch.outer(torch.arange(length, device=q.device).float(), self.inv_freq)
                self.cos, self.sin = torch.cat([angles] * 2, -1).cos(), torch.cat([angles] * 2, -1).sin()
                self.seen = length
            a, b = q.chunk(2, -1)
            return q * self.cos[:length] + torch.cat([-b, a], -1) * self.sin[:length]

    f = world.graphed(Rotary().to(world.device), ladder=[1, 2, 4])
    for n, length in ((2, 6), (3, 6), (2, 4), (2, 9), (2, 6)):
        yield f(world.randn(n, length, 8))
    world.diagnose(f, world.randn(2, 6, 8))


@program("rotary with complex numbers", tags=["text", "attention", "complex"])
def rotary_complex(world: World):
    freqs = torch.polar(torch.ones(6, 4), torch.outer(torch.arange(6.0), torch.rand(4))).to(world.device)

    def rotate(q, k):
        def turn(t):
            z = torch.view_as_complex(t.float().reshape(*t.shape[:-1], -1, 2))
            return torch.view_as_real(z * freqs).flatten(-2).type_as(t)

        return turn(q), turn(k)

    f = world.graphed(rotate, ladder=[1, 2, 4])
    for n in (3, 4, 1):
        yield f(world.randn(n, 6, 8), world.randn(n, 6, 8))
    world.diagnose(f, world.randn(2, 6, 8), world.randn(2, 6, 8))


@program("alibi bias computed in forward", tags=["text", "attention"])
def alibi(world: World):
    slopes = torch.tensor([0.5, 0.25], device=world.device)

    def attend(q, k, v):
        position = torch.arange(q.shape[2], device=q.device)
        bias = -(position[:, None] - position).abs() * slopes[:, None, None]
        return F.scaled_dot_product_attention(q, k, v, attn_mask=bias)

    f = world.graphed(attend, ladder=[1, 2, 4])
    for n in (4, 3):
        yield f(*(world.randn(n, 2, 5, 4) for _ in range(3)))
    world.diagnose(f, *(world.randn(2, 2, 5, 4) for _ in range(3)))


@program("a step for sampling with temperature, top-k and top-p", tags=["text", "sampling"])
def filters(world: World):
    def distribution(logits, temperature, top_p, top_k: int = 5):
        logits = logits / temperature[:, None]
        kth = logits.topk(top_k).values[:, -1:]
        logits = logits.masked_fill(logits < kth, float("-inf"))
        ordered, indices = logits.sort(descending=True)
        cumulative = ordered.softmax(-1).cumsum(-1)
        remove = cumulative - ordered.softmax(-1) > top_p[:, None]
        ordered = ordered.masked_fill(remove, float("-inf"))
        return torch.empty_like(logits).scatter_(1, indices, ordered).softmax(-1)

    f = world.graphed(distribution, ladder=[1, 2, 4, 8], pads={"temperature": 1.0})
    for n in (3, 8, 5):
        yield f(world.randn(n, 12), world.rand(n) + 0.5, world.rand(n))
        yield f(world.randn(n, 12), world.rand(n) + 0.5, world.rand(n), top_k=3)
    world.diagnose(f, world.randn(3, 12), world.rand(3) + 0.5, world.rand(3))


@program("tokens drawn with multinomial", tags=["text", "sampling", "random"])
def multinomial(world: World):
    head = nn.Linear(4, 9).to(world.device)

    def sample(x):
        return torch.multinomial(head(x).softmax(-1), 1).squeeze(-1)

    f = world.graphed(sample, ladder=[1, 2, 4])
    with torch.no_grad():
        x = world.randn(4, 4)
        for _ in range(3):
            torch.manual_seed(11)
            one = f(x).clone()
            torch.manual_seed(11)
            two = f(x).clone()
            yield torch.equal(one, two), one.shape, bool((one < 9).all())
        draws = torch.stack([f(x).clone() for _ in range(60)])
        yield [len(set(column.tolist())) > 1 for column in draws.T]
    world.diagnose(f, world.randn(3, 4))


@program("gumbel-max sampling with noise as an argument", tags=["text", "sampling"])
def gumbel(world: World):
    def sample(logits, uniform):
        return (logits - (-uniform.clamp(1e-6, 1 - 1e-6).log()).log()).argmax(-1)

    f = world.graphed(sample, ladder=[1, 4, 8])
    for n in (6, 8, 1):
        yield f(world.randn(n, 10), world.rand(n, 10))
    world.diagnose(f, world.randn(3, 10), world.rand(3, 10))


@program("repetition penalty over generated tokens", tags=["text", "sampling"])
def repetition(world: World):
    def penalise(logits, generated, penalty=1.3):
        score = logits.gather(1, generated)
        score = torch.where(score < 0, score * penalty, score / penalty)
        return logits.scatter(1, generated, score)

    f = world.graphed(penalise, ladder=[1, 2, 4])
    for n in (3, 4):
        yield f(world.randn(n, 10), world.randint(10, n, 5))
        yield f(world.randn(n, 10), world.randint(10, n, 5), penalty=2.0)
    world.diagnose(f, world.randn(2, 10), world.randint(10, 2, 5))


@program("beam search over a graphed decoder", tags=["text", "generation", "feedback"])
def beam_search(world: World):
    model = GPT().to(world.device).eval()
    f = world.graphed(lambda tokens: model(tokens)[0][:, -1].log_softmax(-1), ladder=[1, 2, 3, 4, 6])
    beams, K = world.randint(32, 1, 3), 3
    scores = torch.zeros(1, device=world.device)
    with torch.no_grad():
        for _ in range(4):
            total = scores[:, None] + f(beams)
            scores, flat = total.flatten().topk(K)
            beams = torch.cat([beams[flat // 32], (flat % 32)[:, None]], 1)
    yield beams, scores
    world.diagnose(f, world.randint(32, 3, 3))


@program("stop when every row has ended", tags=["text", "generation", "host-values"])
def stop_when_ended(world: World):
    emb, head = nn.Embedding(6, 8).to(world.device), nn.Linear(8, 6).to(world.device)

    @torch.no_grad()
    def generate(tokens):
        out, ended = [tokens], torch.zeros_like(tokens, dtype=torch.bool)
        for _ in range(6):
            tokens = torch.where(ended, 0, head(emb(tokens)).argmax(-1))
            ended |= tokens == 0
            out.append(tokens)
            if ended.all():
                break
        return torch.stack(out, 1)

    f = world.graphed(generate, ladder=[2, 4])
    for n in (3, 4):
        yield f(world.randint(6, n))
    world.diagnose(f, world.randint(6, 3))


@program("a whole generation loop of fixed length in the graph", tags=["text", "generation"])
def fixed_loop(world: World):
    emb, head = nn.Embedding(6, 8).to(world.device), nn.Linear(8, 6).to(world.device)

    @torch.inference_mode()
    def generate(tokens, steps=5):
        out = [tokens]
        for _ in range(steps):
            out.append(head(emb(out[-1])).argmax(-1))
        return torch.stack(out, 1)

    f = world.graphed(generate, ladder=[1, 2, 4])
    for n in (3, 1):
        yield f(world.randint(6, n))
        yield f(world.randint(6, n), steps=2)
    world.diagnose(f, world.randint(6, 3))


@program("classifier-free guidance on doubled batches", tags=["text", "generation"])
def guidance(world: World):
    net = nn.Linear(6, 4).to(world.device)

    def guided(x, condition, scale=3.0):
        both = net(torch.cat([torch.cat([x, x]), torch.cat([condition, torch.zeros_like(condition)])], 1))
        cond, uncond = both.chunk(2)
        return uncond + scale * (cond - uncond)

    f = world.graphed(guided, ladder=[1, 2, 4])
    with torch.no_grad():
        for n in (3, 4):
            yield f(world.randn(n, 4), world.randn(n, 2))
    world.diagnose(f, world.randn(3, 4), world.randn(3, 2))


@program("named tuple of logits and hidden states", tags=["text", "structures"])
def named_tuple(world: World):
    class Output(NamedTuple):
        logits: torch.Tensor
        hidden: tuple
        cache: object = None

    emb, fc = nn.Embedding(9, 4).to(world.device), nn.Linear(4, 9).to(world.device)

    def run(ids):
        h0 = emb(ids)
        h1 = h0.tanh()
        return Output(fc(h1), (h0, h1))

    f = world.graphed(run, ladder=[1, 2, 4])
    with torch.no_grad():
        for n in (2, 3):
            out = f(world.randint(9, n, 3))
            yield out, out.cache is None, out._fields
    world.diagnose(f, world.randint(9, 3, 3))


@program("byte-pair lookups on the host between two graphs", tags=["text", "numpy"])
def host_between(world: World):
    table = {i: (i * 7) % 11 for i in range(11)}
    encode = world.graphed(nn.Embedding(11, 4).to(world.device), ladder=[2, 4])
    classify = world.graphed(nn.Linear(4, 11).to(world.device), ladder=[2, 4])
    with torch.no_grad():
        for n in (3, 4):
            tokens = classify(encode(world.randint(11, n))).argmax(-1)
            again = torch.tensor([table[t] for t in tokens.tolist()], device=world.device)
            yield classify(encode(again)).cpu().numpy()
    world.diagnose(encode, world.randint(11, 3))
    world.diagnose(classify, world.randn(3, 4))


@program("mixture of experts, dense and routed by top-k", tags=["text", "routing"])
def experts_dense(world: World):
    class MoE(nn.Module):
        def __init__(self):
            super().__init__()
            self.gate = nn.Linear(4, 3)
            self.w = nn.Parameter(torch.randn(3, 4, 4))

        def forward(self, x):
            weights, chosen = self.gate(x).softmax(-1).topk(2)
            every = torch.einsum("bd,edf->bef", x, self.w)
            picked = every.gather(1, chosen[..., None].expand(-1, -1, 4))
            return (weights[..., None] * picked).sum(1)

    f = world.graphed(MoE().to(world.device), ladder=[1, 2, 4])
    with torch.no_grad():
        for n in (4, 3, 1):
            yield f(world.randn(n, 4))
    world.diagnose(f, world.randn(3, 4))


@program("mixture of experts, a loop with boolean masks", tags=["text", "routing", "host-values"])
def experts_masked(world: World):
    class MoE(nn.Module):
        def __init__(self):
            super().__init__()
            self.gate = nn.Linear(4, 3)
            self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

        def forward(self, x):
            chosen = self.gate(x).argmax(-1)
            out = torch.zeros_like(x)
            for i, expert in enumerate(self.experts):
                rows = chosen == i
                if rows.any():
                    out[rows] = expert(x[rows])
            return out

    f = world.graphed(MoE().to(world.device), ladder=[1, 2, 4])
    with torch.no_grad():
        for n in (4, 3, 1):
            yield f(world.randn(n, 4))
    world.diagnose(f, world.randn(3, 4))


@program("expert loads counted in a buffer", tags=["text", "routing", "state"])
def expert_loads(world: World):
    class Router(nn.Module):
        def __init__(self):
            super().__init__()
            self.gate = nn.Linear(4, 3)
            self.register_buffer("load", torch.zeros(3))

        def forward(self, x):
            chosen = self.gate(x).argmax(-1)
            self.load += F.one_hot(chosen, 3).sum(0)
            return chosen

    f = world.graphed(Router().to(world.device), ladder=[2, 4])
    with torch.no_grad():
        for n in (4, 4, 2, 3):
            yield f(world.randn(n, 4))
            yield f.load.clone()
    world.diagnose(f, world.randn(4, 4))


@program(
    "mean pooling, normalised sentence vectors, similarity matrix outside", tags=["text", "results-kept"]
)
def sentence_vectors(world: World):
    emb = nn.Embedding(30, 8).to(world.device)

    @torch.inference_mode()
    def embed(ids, mask):
        h = emb(ids) * mask[..., None]
        return F.normalize(h.sum(1) / mask.sum(1, keepdim=True).clamp(min=1), dim=-1)

    f = world.graphed(embed, ladder=[1, 2, 4])
    corpus = torch.cat([f(world.randint(30, n, 5), torch.ones(n, 5, device=world.device)) for n in (4, 4, 2)])
    queries = f(world.randint(30, 3, 5), world.randint(2, 3, 5).float())
    yield queries @ corpus.T
    yield (queries @ corpus.T).topk(3).indices
    world.diagnose(f, world.randint(30, 3, 5), torch.ones(3, 5, device=world.device))


@program("ctc greedy decoding after log-softmax", tags=["text", "audio"])
def ctc(world: World):
    fc = nn.Linear(4, 6).to(world.device)
    f = world.graphed(lambda x: fc(x).log_softmax(-1), ladder=[1, 2, 4])
    with torch.no_grad():
        for n in (2, 3):
            best = f(world.randn(n, 8, 4)).argmax(-1)
            yield [[int(t) for t in torch.unique_consecutive(row) if t != 0] for row in best]
    world.diagnose(f, world.randn(3, 8, 4))


@program("speculative verification: accepted prefix lengths", tags=["text", "sampling"])
def accepted(world: World):
    def accept(draft, target):
        match = (draft == target[:, :-1]).long()
        count = match.cumprod(1).sum(1)
        return count, target.gather(1, count[:, None]).squeeze(1)

    f = world.graphed(accept, ladder=[1, 2, 4])
    for n in (3, 4, 2):
        yield f(world.randint(2, n, 4), world.randint(2, n, 5))
    world.diagnose(f, world.randint(2, 3, 4), world.randint(2, 3, 5))


@program("logits processor list of callables", tags=["text", "sampling", "python"])
def processors(world: World):
    class Temperature:
        def __init__(self, t):
            self.t = t

        def __call__(self, scores):
            return scores / self.t

    class Ban:
        def __init__(self, tokens):
            self.tokens = tokens

        def __call__(self, scores):
            scores = scores.clone()
            scores[:, self.tokens] = -torch.inf
            return scores

    processors = [Temperature(0.7), Ban([1, 4])]

    def run(logits):
        for p in processors:
            logits = p(logits)
        return logits.softmax(-1)

    f = world.graphed(run, ladder=[1, 2, 4])
    yield f(world.randn(3, 6))
    processors[0].t = 1.5
    yield f(world.randn(3, 6))
    processors[1].tokens.append(0)
    yield f(world.randn(3, 6))
    processors.append(Ban([5]))
    yield f(world.randn(2, 6))
    world.diagnose(f, world.randn(2, 6))
