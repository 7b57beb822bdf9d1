"""Faults that an engine's graphs can have, planted before it is built, or in it. Here and on CUDA alike."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from ostinato.engine.llm import LLM
from ostinato.engine.loading import load as loading
from ostinato.engine.sampling.sampler import Sampler
from ostinato.engine.stepping.model_runner import ModelRunner
from ostinato.engine.stepping.token_return import PlainSampling
from ostinato.graphs import InputBuffers
from ostinato.kernels.attention.backend import AttentionBackend
from ostinato.kernels.attention.batch import AttentionBatch, HostLengths
from ostinato.models.layers import RotaryTable
from ostinato.models.transformer import Transformer

Plant = Callable[[pytest.MonkeyPatch], None]


def _with_backend(
    monkeypatch: pytest.MonkeyPatch, change: Callable[[AttentionBackend], AttentionBackend]
) -> None:
    original = loading.get_backend
    monkeypatch.setattr(loading, "get_backend", lambda name, device: change(original(name, device)))


def attention_off_by_one_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """No token sees itself; its keys and values are stored all the same."""

    def one_short(batch: AttentionBatch) -> AttentionBatch:
        least = batch.query_lens.clamp(min=1)
        return replace(
            batch,
            positions=(batch.positions - 1).clamp(min=0),
            seq_lens=torch.maximum(batch.seq_lens - 1, least),
        )

    def changed(backend: AttentionBackend) -> AttentionBackend:
        def attend(q: Any, k_cache: Any, v_cache: Any, batch: AttentionBatch, **options: Any) -> Any:
            return backend.attend(q, k_cache, v_cache, one_short(batch), **options)

        def attend_eager(
            q: Any, k_cache: Any, v_cache: Any, batch: AttentionBatch, *, lengths: Any = None, **options: Any
        ) -> Any:
            if lengths is not None:
                pairs = zip(lengths.query_lens, lengths.seq_lens, strict=True)
                shorter = [max(seq_len - 1, query_len, 1) for query_len, seq_len in pairs]
                lengths = HostLengths(lengths.query_starts, lengths.query_lens, shorter)
            short = one_short(batch)
            return backend.attend_eager(q, k_cache, v_cache, short, lengths=lengths, **options)

        return replace(backend, attend_qkv=None, attend=attend, attend_eager=attend_eager)

    _with_backend(monkeypatch, changed)


def a_page_read_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention reads the first page of a context where the second should be: keys 16 to 31 are lost."""

    def twice(batch: AttentionBatch) -> AttentionBatch:
        table = batch.page_table.clone()
        table[:, 1] = table[:, 0]
        return replace(batch, page_table=table)

    def changed(backend: AttentionBackend) -> AttentionBackend:
        def attend(q: Any, k_cache: Any, v_cache: Any, batch: AttentionBatch, **options: Any) -> Any:
            return backend.attend(q, k_cache, v_cache, twice(batch), **options)

        return replace(backend, attend_qkv=None, attend=attend)

    _with_backend(monkeypatch, changed)


def wrong_rotary_position(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every token is turned as if it stood one place further."""
    looked_up = RotaryTable.forward

    def forward(self: RotaryTable, positions: torch.Tensor) -> Any:
        return looked_up(self, (positions + 1).clamp(max=self.table.size(0) - 1))

    def changed(backend: AttentionBackend) -> AttentionBackend:
        attend_qkv = backend.attend_qkv
        if attend_qkv is None:
            return backend

        def further(rows: Any, heads: Any, *others: Any, **options: Any) -> Any:
            turned = heads._replace(rotary=heads.rotary.roll(-1, 0))
            return attend_qkv(rows, turned, *others, **options)

        return replace(backend, attend_qkv=further)

    monkeypatch.setattr(RotaryTable, "forward", forward)
    _with_backend(monkeypatch, changed)


def stale_padding(monkeypatch: pytest.MonkeyPatch) -> None:
    """Padded requests keep the rows that the batch before had there."""
    filled = InputBuffers.fill
    rows_before: dict[Any, torch.Tensor] = {}

    def fill(self: InputBuffers, batch: Any, shape: Any, descriptor: Any, *, poison: bool = False) -> None:
        filled(self, batch, shape, descriptor, poison=poison)
        if len(self.fields) == 1 or "req_rows" not in batch:
            return
        rows = torch.as_tensor(batch["req_rows"]).cpu()
        before = rows_before.get(descriptor, rows)
        stale = before[rows.numel() :]
        tail = self.views(descriptor)["req_rows"][rows.numel() : rows.numel() + stale.numel()]
        tail.copy_(stale)
        rows_before[descriptor] = rows

    monkeypatch.setattr(InputBuffers, "fill", fill)


def logits_of_another_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every request gets the logits of its neighbour."""
    right = Transformer.logits

    def logits(self: Transformer, hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        return right(self, hidden.roll(1, 0), out)

    monkeypatch.setattr(Transformer, "logits", logits)


def kv_in_the_wrong_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys and values of neighbours on a page change places."""

    def changed(backend: AttentionBackend) -> AttentionBackend:
        def write_kv(k: Any, v: Any, k_cache: Any, v_cache: Any, batch: AttentionBatch) -> None:
            backend.write_kv(k, v, k_cache, v_cache, replace(batch, positions=batch.positions ^ 1))

        return replace(backend, attend_qkv=None, write_kv=write_kv)

    _with_backend(monkeypatch, changed)


def stale_page_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs read a copy of the page table that nobody keeps up to date."""
    made = ModelRunner.__init__

    def init(self: ModelRunner, *arguments: Any, **more: Any) -> None:
        made(self, *arguments, **more)
        self.page_table = self.page_table.clone()

    monkeypatch.setattr(ModelRunner, "__init__", init)


def temperature_of_the_last_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sampling graphs read a copy of the temperatures and bring it up to date when they are done."""
    made, sampled = Sampler.__init__, Sampler._sample_asking
    stale: dict[int, torch.Tensor] = {}

    def init(self: Sampler, runner: ModelRunner) -> None:
        made(self, runner)
        stale[id(self)] = self._asked.temperature.clone()
        self._asked = self._asked._replace(temperature=stale[id(self)])

    def sample(self: Sampler, *inputs: torch.Tensor, has_filters: bool) -> None:
        sampled(self, *inputs, has_filters=has_filters)
        stale[id(self)].copy_(self._rows["temperature"])

    monkeypatch.setattr(Sampler, "__init__", init)
    monkeypatch.setattr(Sampler, "_sample_asking", sample)


def _with_asking(
    monkeypatch: pytest.MonkeyPatch, change: Callable[[torch.Tensor, torch.Tensor], tuple[Any, Any]]
) -> None:
    sampled = Sampler._sample_asking

    def sample(self: Sampler, rows: torch.Tensor, places: torch.Tensor, *, has_filters: bool) -> None:
        sampled(self, *change(rows, places), has_filters=has_filters)

    monkeypatch.setattr(Sampler, "_sample_asking", sample)


def amended_at_the_wrong_places(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those who ask for more get each other's logits and places."""
    _with_asking(monkeypatch, lambda rows, places: (rows, places.roll(1)))


def padding_that_is_served(monkeypatch: pytest.MonkeyPatch) -> None:
    """Padded requests have row 1 as the first one has: its token is counted more than once."""
    _with_asking(monkeypatch, lambda rows, places: (rows.clamp(min=1), places))


def penalties_that_are_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens are counted in a copy."""
    made = Sampler.__init__

    def init(self: Sampler, runner: ModelRunner) -> None:
        made(self, runner)
        self._asked = self._asked._replace(generated=self.generated.clone())

    monkeypatch.setattr(Sampler, "__init__", init)


def plain_temperature_of_the_last_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same in the plain sampling at the end of decode graphs."""
    made, called = PlainSampling.__init__, PlainSampling.__call__
    stale: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def init(self: PlainSampling, *arguments: Any) -> None:
        made(self, *arguments)
        temperature = self._settings.temperature
        stale[id(self)] = temperature.clone(), temperature
        self._settings = self._settings._replace(temperature=stale[id(self)][0])

    def call(self: PlainSampling, req_rows: torch.Tensor) -> None:
        called(self, req_rows)
        copy, temperature = stale[id(self)]
        copy.copy_(temperature)

    monkeypatch.setattr(PlainSampling, "__init__", init)
    monkeypatch.setattr(PlainSampling, "__call__", call)


PLANTED: dict[str, tuple[Plant, str]] = {
    "attention off by one key": (attention_off_by_one_key, r"full decode 4x1"),
    "wrong rotary position": (wrong_rotary_position, r"full decode 4x1"),
    "a padded field left stale": (stale_padding, r"full decode 4x1"),
    "logits of another row": (logits_of_another_row, r"full decode 4x1"),
    "a KV write to the wrong slot": (kv_in_the_wrong_slot, r"full decode 4x1"),
    "a stale page table": (stale_page_table, r"full decode 4x1"),
    "last step's temperature": (temperature_of_the_last_step, r"sampling filtered decode 4x1"),
    "last step's temperature, adjusted": (temperature_of_the_last_step, r"sampling adjusted decode 4x1"),
    "amended at the wrong places": (amended_at_the_wrong_places, r"sampling adjusted decode 4x1"),
    "padding that is served": (padding_that_is_served, r"sampling filtered decode 4x1"),
    "penalties that are not counted": (penalties_that_are_not_counted, r"sampling adjusted decode 4x1"),
    "last step's temperature in a decode graph": (plain_temperature_of_the_last_step, r"full decode 4x1"),
}
"""What to plant, and a graph that must be named."""


def move_a_weight(llm: LLM) -> str:
    """Give a layer a new tensor of the same values; the name of the old one."""
    layer: Any = llm.engine.core.loaded.model.layers[1]
    projection = layer.self_attn.o_proj
    llm.kept = projection.weight  # type: ignore[attr-defined]  # graphs still read it
    projection.weight = torch.nn.Parameter(projection.weight.clone(), requires_grad=False)
    return "layers.1.self_attn.o_proj.weight"
