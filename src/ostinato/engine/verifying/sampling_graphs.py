"""Sampling graphs: every kind and rung on made logits, other parameters in the rows at every launch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np
import torch
from torch import Tensor

from ostinato.graphs import BatchShape, CapturedGraph, CudaGraphRunner
from ostinato.text.grammar import Grammar

from ..core import EngineCore
from ..sampling.sampler import Kind
from ..sampling_params import MAX_LOGPROBS, SamplingParams
from ..scheduling.request import IntArray, Request
from ..token_ids import token_array
from .borrowed_pages import HOSTILE
from .outcome import Check
from .reference_sampling import SampledFrom
from .row_state import written_line

_SPREAD = 2.5
"""Deviation of made logits: enough tokens are likely for a wrong temperature to show."""
_PROMPT = 24
_LOGPROB_ERROR = 1e-3
_FEW = 4


@dataclass(frozen=True)
class _Asked:
    """What a made row asks for."""

    params: SamplingParams
    is_masked: bool = False

    @property
    def kind(self) -> Kind:
        return Kind.COMPLETE if self.is_masked else Kind.of(self.params)


_EOS = 1
_ASKED = (
    _Asked(SamplingParams(temperature=0.0)),
    _Asked(SamplingParams(temperature=1.5, seed=1)),
    _Asked(SamplingParams(temperature=0.3, seed=(1 << 62) + 5)),
    _Asked(SamplingParams(temperature=0.9, seed=2, top_k=5)),
    _Asked(SamplingParams(temperature=1.2, seed=3, top_p=0.6)),
    _Asked(SamplingParams(temperature=1.8, seed=4, min_p=0.2)),
    _Asked(SamplingParams(temperature=1.0, seed=5, top_k=40, top_p=0.9, min_p=0.01)),
    _Asked(SamplingParams(temperature=0.0, repetition_penalty=1.4, presence_penalty=0.7)),
    _Asked(SamplingParams(temperature=1.1, seed=6, frequency_penalty=1.5, top_p=0.8)),
    _Asked(SamplingParams(temperature=0.8, seed=7, logit_bias={2: 9.0, 3: -100.0, 4: 8.5})),
    _Asked(SamplingParams(temperature=0.0, logprobs=3, logit_bias={_EOS: 100.0}, min_tokens=10)),
    _Asked(SamplingParams(temperature=0.0, logprobs=5, logit_bias={_EOS: 100.0}, min_tokens=2)),
    _Asked(SamplingParams(temperature=1.3, seed=8, logprobs=0), is_masked=True),
    _Asked(SamplingParams(temperature=0.0), is_masked=True),
)
"""In turn; graphs of simpler kinds see those that they serve."""


@dataclass
class SamplingGraphs:
    """Launches sampling graphs and compares tokens, log-probabilities and what they leave in rows."""

    core: EngineCore
    generator: np.random.Generator

    def __post_init__(self) -> None:
        runner = self.core.runner
        made = torch.Generator(runner.logits.device).manual_seed(int(self.generator.integers(1 << 31)))
        self._logits = torch.empty_like(runner.logits).normal_(0, _SPREAD, generator=made)

    def check(self, kind: Kind, graph: CapturedGraph, name: str) -> Iterator[Check]:
        """All that is to be known about one graph."""
        full = graph.descriptor.num_reqs
        # Few rows show less of what is wrong with them at a time.
        counts = [full, full, max(1, full // 3), *[full] * (full <= _FEW)]
        for launch, count in enumerate(counts):
            yield from self._launch(kind, graph, name, count, launch)

    def _launch(
        self, kind: Kind, graph: CapturedGraph, name: str, count: int, launch: int
    ) -> Iterator[Check]:
        core, poison = self.core, launch == 2
        runner, sampler = core.runner, core.sampler
        assert sampler is not None
        batch = f"{count} requests, launch {launch + 1}"
        state = "poison" if poison else "plain"
        # The same rows, other parameters: what a graph remembers of the last launch is wrong now.
        rows = list(range(1, count + 1))
        sources = self._seat(kind, rows, launch)
        runner.logits.copy_(self._logits)
        graphs: CudaGraphRunner = sampler.graphs[kind]
        if poison:
            runner.logits[count:] = HOSTILE
            graphs.poison_surroundings()
            for field, value in (("temperature", 50.0), ("top_k", 1), ("repetition", 7.0), ("seeds", 9)):
                runner.rows.write(field, 0, value)
            runner.rows.send()
        lengths, generated = runner.lengths.clone(), sampler.generated.clone()
        number = int(runner.returned.lines.counts[0])
        graphs.buffers.fill(
            {"req_rows": np.array(rows, dtype=np.int32)},
            BatchShape.decode(count),
            graph.descriptor,
            poison=poison,
        )
        graphs.launch(graph)
        written, *tokens = written_line(core, number, count)
        raw = self._logits
        wrong = [at for at, source in enumerate(sources) if not source.is_right(tokens[at], raw[at])]
        detail = f"request {wrong[0]} with {_told(sources[wrong[0]].params)}" if wrong else ""
        found = [("tokens", float(len(wrong)), 0.0, detail)]
        found.append(("line", float(written != number), 0.0, ""))
        now = int(runner.returned.lines.counts[0])
        found.append(("number of lines", float(abs(now - number - 1)), 0.0, ""))
        kept = runner.last_tokens[1 : count + 1].tolist()
        changed = sum(a != b for a, b in zip(kept, tokens, strict=True))
        found.append(("last tokens", float(changed + int(runner.last_tokens[0] != 0)), 0.0, ""))
        found.append(("lengths", float((runner.lengths != lengths).sum()), 0.0, ""))
        if kind is Kind.COMPLETE:
            places = torch.tensor(rows, device=lengths.device), torch.tensor(tokens, device=lengths.device)
            generated[places] += 1
            found += self._logprobs(graph, raw[:count], tokens)
        found.append(("counted tokens", float((sampler.generated != generated).sum()), 0.0, ""))
        for what, error, tolerance, more in found:
            yield Check(name, batch, state, what, error, tolerance, more)

    def _seat(self, kind: Kind, rows: Sequence[int], launch: int) -> list[SampledFrom]:
        """Put requests with their parameters into rows; what each one's token must come from."""
        runner, sampler = self.core.runner, self.core.sampler
        assert sampler is not None
        choice = [asked for asked in _ASKED if asked.kind <= kind]
        vocab = runner.logits.size(1)
        requests, sources, masked = [], [], []
        for row in rows:
            asked = choice[(row + 5 * launch) % len(choice)]
            prompt = self.generator.integers(2, vocab, _PROMPT).tolist()
            output = self.generator.integers(2, vocab, 6).tolist()
            request = Request("verify", token_array(prompt), asked.params, frozenset([_EOS]))
            request.row = row
            request._settled_output = output
            allowed: Tensor | None = None
            if asked.is_masked:
                mask = _EveryThird(int(self.generator.integers(3)))
                request.grammar = cast(Grammar, mask)
                allowed = mask.allowed(vocab).to(runner.logits.device)
                masked.append(request)
            position = len(prompt) + len(output)
            is_early = len(output) < asked.params.min_tokens
            banned = (_EOS,) if asked.params.min_tokens and is_early else ()
            sources.append(SampledFrom(asked.params, position, prompt, output, banned, allowed))
            requests.append(request)
            runner.rows.write("lengths", row, position)
        sampler.join(requests)
        sampler.mask(masked)
        runner.rows.write("temperature", 0, 0.0)
        runner.rows.send()
        return sources

    def _logprobs(
        self, graph: CapturedGraph, raw: Tensor, tokens: Sequence[int]
    ) -> Iterator[tuple[str, float, float, str]]:
        """Of the chosen tokens and the likeliest, and the ranks."""
        count = len(tokens)
        chosen, ranks, top, top_tokens = (leaf[:count] for leaf in graph.leaves)
        right = raw.double().log_softmax(-1)
        own = right.gather(1, torch.tensor(tokens, device=right.device).unsqueeze(1))
        best = right.topk(min(MAX_LOGPROBS, right.size(1)), dim=-1).values
        errors = (
            chosen.double().unsqueeze(1) - own,
            top.double() - best,
            right.gather(1, top_tokens) - best,
        )
        yield "logprobs", max(_largest(error) for error in errors), _LOGPROB_ERROR, ""
        # Equal to within rounding may be counted either way.
        fewest = (right > own + _LOGPROB_ERROR).sum(-1) + 1
        most = (right > own - _LOGPROB_ERROR).sum(-1)
        wrong = ((ranks < fewest) | (ranks > most.clamp(min=1))).sum()
        yield "ranks", float(wrong), 0.0, ""


class _EveryThird:
    """A grammar that allows every third token."""

    def __init__(self, first: int) -> None:
        self._first = first

    def allowed(self, vocab: int) -> Tensor:
        """bool [vocab]."""
        return torch.arange(vocab) % 3 == self._first

    def fill(self, mask: IntArray) -> None:
        """As `Grammar.fill`: a bit for each token, the lowest first."""
        bits = self.allowed(32 * mask.size).numpy().reshape(-1, 32)
        mask[:] = np.packbits(bits, axis=1, bitorder="little").view(np.int32).reshape(mask.shape)


def _told(params: SamplingParams) -> str:
    """What is not as it is by default."""
    default = SamplingParams()
    given = {name: value for name, value in vars(params).items() if value != getattr(default, name)}
    return ", ".join(f"{name}={value}" for name, value in given.items())


def _largest(error: Tensor) -> float:
    return float(error.abs().max().nan_to_num(nan=float("inf")))
