"""A decode step of a model without an engine, and its parts, for timing in captured graphs."""

import functools
import statistics
from collections.abc import Callable, Iterable
from typing import Any, cast

import torch
from torch import Tensor

from ostinato.kernels.attention import PAGE_SIZE, AttentionBatch, HeadPreparation, get_backend
from ostinato.kernels.lora import Adapters
from ostinato.kernels.sampling.plain import PlainSettings, return_plain
from ostinato.kernels.sampling.token_lines import TokenLines
from ostinato.models.forms.general import General, Sum
from ostinato.models.layer import Layer
from ostinato.models.mixing import FromRows, StepAttention
from ostinato.models.transformer import Transformer

Part = tuple[Callable[[int], Any], int]
"""The function to run for a layer, and the bytes that it must read or write at least."""


class LayerStep:
    """The first layers of a model with their caches, and a batch of the same number of tokens each."""

    def __init__(
        self, model: Transformer, batch_size: int, *, num_layers: int, context: int, query_len: int = 1
    ) -> None:
        """`context` is the length of every request, its `query_len` tokens included."""
        config, device = model.config, model.embed_tokens.weight.device
        self.model = model
        self.context = context
        self.layers = list(cast("Iterable[Layer]", model.layers))[:num_layers]
        pages = -(-context // PAGE_SIZE)
        shape = (batch_size * pages + 1, PAGE_SIZE, config.num_kv_heads, config.head_dim)
        dtype = model.embed_tokens.weight.dtype
        self.caches = [
            (torch.randn(shape, device=device).to(dtype), torch.randn(shape, device=device).to(dtype))
            for _ in self.layers
        ]
        table = torch.zeros(batch_size + 1, pages, dtype=torch.int32, device=device)
        order = torch.randperm(batch_size * pages, device=device) + 1
        table[1:] = order.view(batch_size, pages).int()
        ones = torch.ones(batch_size, dtype=torch.int32, device=device)
        each = torch.arange(batch_size, dtype=torch.int32, device=device)
        last = torch.arange(context - query_len, context, device=device)
        batch = AttentionBatch(
            table,
            token_rows=(each + 1).repeat_interleave(query_len),
            positions=last.repeat(batch_size),
            req_rows=each + 1,
            seq_lens=ones * context,
            query_starts=each * query_len,
            query_lens=ones * query_len,
            max_query_len=query_len,
            max_context=context,
            equal_places=True,
        )
        self.use(batch)
        self.mix = FromRows(StepAttention(self._refuse, self._attend), model.rotary.table)

        def random(width: int) -> Tensor:
            return torch.randn(batch_size * query_len, width, device=device).to(dtype)

        self.hidden, self.residual = random(config.hidden_size), random(config.hidden_size)
        self.qkv = random(self.layers[0].self_attn.qkv_proj.weight.size(0))
        self.attended = random(config.num_heads * config.head_dim)
        self.inner = random(config.intermediate_size)
        self.scores = torch.randn(batch_size * query_len, config.vocab_size, device=device)

    def use(self, batch: AttentionBatch) -> None:
        """Attend over this batch from now on."""
        self.batch, config = batch, self.model.config
        attend_qkv = get_backend("triton", batch.positions.device).attend_qkv
        assert attend_qkv is not None
        self._attend_rows = functools.partial(
            attend_qkv, batch=batch, num_heads=config.num_heads, scale=config.attention_scale
        )

    def _attend(self, layer: int, projected: Tensor, heads: HeadPreparation) -> Tensor:
        k_cache, v_cache = self.caches[layer]
        return self._attend_rows(projected, heads, k_cache, v_cache)

    def _refuse(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        raise AssertionError("the model starts from rows")

    def parts(self) -> dict[str, Part]:
        """The parts of a layer, in the form for this number of tokens."""
        cache_bytes = 2 * self.batch.req_rows.numel() * self.context * self.caches[0][0][0, 0].nbytes
        layer = self.layers[0]
        attention, mlp = layer.self_attn, layer.mlp
        sizes = {
            "qkv": attention.qkv_proj.weight.nbytes + self.hidden.nbytes + self.qkv.nbytes,
            "attention": cache_bytes + self.qkv.nbytes + self.attended.nbytes,
            "o": attention.o_proj.weight.nbytes + self.attended.nbytes + self.hidden.nbytes,
            "gate, up": mlp.gate_up_proj.weight.nbytes + self.hidden.nbytes + self.inner.nbytes,
            "down": mlp.down_proj.weight.nbytes + self.inner.nbytes + self.hidden.nbytes,
            "add, norm": 4 * self.hidden.nbytes,
        }
        parts = self._steps()
        parts["attention"] = lambda i: self.mix(self.layers[i].self_attn, self.qkv)
        return {name: (parts[name], size) for name, size in sizes.items() if name in parts}

    def _steps(self) -> dict[str, Callable[[int], Any]]:
        """The steps of a layer around attention, in the form for this number of tokens."""
        form, layers = self.model.form(self.hidden.size(0)), self.layers
        norm = layers[0].input_layernorm
        rows = form.normed(form.begin(self.residual, norm), norm)
        steps: dict[str, Callable[[int], Any]] = {
            "qkv": lambda i: form.project(rows, norm, layers[i].self_attn.qkv_proj),
            "o": lambda i: form.add(rows, layers[i].self_attn.o_proj, self.attended, norm),
            "gate, up": lambda i: form.project(rows, norm, layers[i].mlp.gate_up_proj, gated=True),
            "down": lambda i: form.add(rows, layers[i].mlp.down_proj, self.inner, norm),
        }
        if isinstance(form, General):
            steps["add, norm"] = lambda i: form.normed(
                Sum(self.residual, added=self.hidden), layers[i].input_layernorm
            )
        return steps

    def run_layers(self, adapters: Adapters | None = None) -> Tensor:
        """Run all layers, from hidden states to hidden states."""
        form = self.model.form(self.hidden.size(0), adapters)
        hidden = self.hidden if form.keeps_input else self.hidden.clone()
        return form.through(self.layers, hidden, self.mix, self.model.norm)

    def run_head(self) -> Tensor:
        """Run the output layer, from hidden states to logits."""
        return self.model.logits(self.hidden, out=self.scores)


class PlainStep:
    """The end of a decode step: plain sampling, with the same temperature for all rows."""

    def __init__(self, batch_size: int, temperature: float) -> None:
        ones = torch.ones(batch_size + 1, dtype=torch.int32, device="cuda")
        self._rows = ones.cumsum(0, dtype=torch.int32)[:-1]  # row 0 is padding's
        self._settings = PlainSettings(ones, ones * temperature, ones.long(), ones)
        self._lines = TokenLines.of(ones.long(), ones[:1].long(), batch_size, 4)

    def __call__(self, logits: Tensor) -> None:
        """Choose tokens and return them to the host."""
        rows = self._rows[: logits.size(0)]
        return_plain(logits, rows, self._settings, self._lines)


def graph_us(function: Callable[[], Any], *, replays: int = 10, rounds: int = 5) -> float:
    """Microseconds of one replay of the captured function; median over rounds."""
    function()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        function()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    times = []
    for _ in range(rounds):
        begin.record()
        for _ in range(replays):
            graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) * 1000 / replays)
    return statistics.median(times)
