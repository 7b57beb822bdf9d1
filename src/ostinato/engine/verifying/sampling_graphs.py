"""Sampling graphs: every kind and rung on made logits, with other parameters in the rows at every launch.

Graphs for requests that need more get a line full of other tokens, and requests at random places in it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import TypeAlias, cast

import numpy as np
import torch
from torch import Tensor

from ostinato.grammars.followed_text import FollowedText
from ostinato.graphs import BatchShape, CapturedGraph, CudaGraphRunner
from ostinato.kernels.sampling.token_lines import LINE_HEAD

from ..core import EngineCore
from ..parameters.sampling_params import SamplingParams
from ..sampling.kinds import Kind
from ..scheduling.request import IntArray, Request
from ..token_ids import token_array
from .borrowed_pages import HOSTILE
from .outcome import Check
from .reference_sampling import SampledFrom
from .row_state import written_line

_SPREAD = 2.5
"""Standard deviation of made logits: enough tokens are likely for a wrong temperature to show."""
_PROMPT = 24
_LOGPROB_ERROR = 1e-3
_FEW = 4
_Found: TypeAlias = tuple[str, float, float, str]
"""What was compared, the error, its tolerance, and more about it."""


@dataclass(frozen=True)
class _Asked:
    """What a made row asks for."""

    params: SamplingParams
    is_masked: bool = False

    @property
    def kind(self) -> Kind:
        return max(Kind.of(self.params), Kind.ADJUSTED if self.is_masked else Kind.PLAIN)


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
"""Used in turn; a graph's rows ask only for what its kind serves, and plain graphs only get plain rows."""
_UNTOUCHED = -7
"""Stands for other requests' tokens in a line that is amended."""


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
        """All checks of one graph."""
        full = graph.descriptor.num_reqs
        # Few rows show fewer faults per launch.
        counts = [full, full, max(1, full // 3), *[full] * (full <= _FEW)]
        for launch, count in enumerate(counts):
            batch, state = f"{count} requests, launch {launch + 1}", "poison" if launch == 2 else "plain"
            for what, error, tolerance, more in self._launch(kind, graph, count, launch):
                yield Check(name, batch, state, what, error, tolerance, more)

    def _launch(self, kind: Kind, graph: CapturedGraph, count: int, launch: int) -> Iterator[_Found]:
        core, poison = self.core, launch == 2
        runner, sampler = core.runner, core.sampler
        assert sampler is not None
        # The same rows with other parameters: anything a graph remembers of the last launch is now wrong.
        rows = list(range(1, count + 1))
        sources = self._seat(kind, rows, launch)
        runner.logits.copy_(self._logits)
        graphs: CudaGraphRunner = sampler.graphs[kind]
        places = list(range(count)) if kind is Kind.PLAIN else self._places(count)
        inputs = {"req_rows": np.array(rows, dtype=np.int32)}
        if kind is not Kind.PLAIN:
            inputs = {"rows": inputs["req_rows"], "places": np.array(places, dtype=np.int32)}
        if poison:
            others = [at for at in range(runner.logits.size(0)) if at not in places]
            runner.logits[others] = HOSTILE
            graphs.poison_surroundings()
            for field, value in (("temperature", 50.0), ("top_k", 1), ("repetition", 7.0), ("seeds", 9)):
                runner.rows.write(field, 0, value)
            runner.rows.write("num_logprobs", 0, 3)
            runner.rows.send()
        number = self._begin_line(kind)
        before = _State(runner.lengths.clone(), runner.last_tokens.clone(), sampler.generated.clone())
        graphs.buffers.fill(inputs, BatchShape.decode(count), graph.descriptor, poison=poison)
        graphs.launch(graph)
        written, *line = written_line(core, number, runner.logits.size(0))
        tokens, raw = [line[place] for place in places], self._logits[places]
        wrong = [at for at, source in enumerate(sources) if not source.is_right(tokens[at], raw[at])]
        detail = f"request {wrong[0]} with {_told(sources[wrong[0]].params)}" if wrong else ""
        yield "tokens", float(len(wrong)), 0.0, detail
        yield "line", float(written != number), 0.0, ""
        mark = int(runner.returned.lines.ring[number % runner.returned.lines.ring.size(0), 3])
        yield "mark of amended lines", float(mark != (kind is not Kind.PLAIN)), 0.0, ""
        now = int(runner.returned.lines.counts[0])
        yield "number of lines", float(abs(now - number - 1)), 0.0, ""
        before.last_tokens[rows] = torch.tensor(tokens, device=before.lengths.device)
        yield "last tokens", float((runner.last_tokens != before.last_tokens).sum()), 0.0, ""
        yield "lengths", float((runner.lengths != before.lengths).sum()), 0.0, ""
        if kind is not Kind.PLAIN:
            others = [token for at, token in enumerate(line) if at not in places]
            changed = sum(token != _UNTOUCHED for token in others)
            yield "tokens of others", float(changed), 0.0, ""
            for row, source, token in zip(rows, sources, tokens, strict=True):
                before.generated[row, token] += source.params.has_penalties
            yield from self._logprobs(number, sources, raw, tokens)
        yield "counted tokens", float((sampler.generated != before.generated).sum()), 0.0, ""

    def _places(self, count: int) -> list[int]:
        """Random places among the requests that a step can have."""
        places: list[int] = self.generator.permutation(self.core.runner.logits.size(0))[:count].tolist()
        return places

    def _begin_line(self, kind: Kind) -> int:
        """The number of the line that a graph will write, or of one prepared for it to amend."""
        lines = self.core.runner.returned.lines
        number = int(lines.counts[0])
        if kind is not Kind.PLAIN:
            line = lines.ring[number % lines.ring.size(0)]
            line[0], line[1:LINE_HEAD], line[LINE_HEAD:] = number, 0, _UNTOUCHED
            lines.counts[0] += 1
            assert self.core.sampler is not None
            self.core.sampler.logprobs.ranks[number % lines.ring.size(0)] = _UNTOUCHED
        return number

    def _seat(self, kind: Kind, rows: Sequence[int], launch: int) -> list[SampledFrom]:
        """Put requests with their parameters into rows; returns what each one's token must come from."""
        runner, sampler = self.core.runner, self.core.sampler
        assert sampler is not None
        least = Kind.PLAIN if kind is Kind.PLAIN else Kind.ADJUSTED
        choice = [asked for asked in _ASKED if least <= asked.kind <= kind]
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
                request.grammar = cast(FollowedText, mask)
                allowed = mask.allowed(vocab).to(runner.logits.device)
                masked.append(request)
            position = len(prompt) + len(output)
            is_early = len(output) < asked.params.min_tokens
            banned = (_EOS,) if asked.params.min_tokens and is_early else ()
            sources.append(SampledFrom(asked.params, position, prompt, output, banned, allowed))
            requests.append(request)
            runner.rows.write("lengths", row, position)
        sampler.join(requests)
        for request, source in zip(requests, sources, strict=True):
            # With logprobs_mode=processed_logprobs graphs return none to some requests; here they return all.
            asked_for = source.params.logprobs
            runner.rows.write("num_logprobs", request.row, -1 if asked_for is None else min(asked_for, vocab))
        sampler.mask(masked)
        runner.rows.write("temperature", 0, 0.0)
        runner.rows.send()
        return sources

    def _logprobs(
        self, number: int, sources: Sequence[SampledFrom], raw: Tensor, tokens: Sequence[int]
    ) -> Iterator[_Found]:
        """Logprobs and ranks of requests that ask, for chosen and most likely tokens; others have none."""
        assert self.core.sampler is not None
        values, named, ranks = self.core.sampler.logprobs
        number %= values.size(0)
        largest, wrong, untold = 0.0, 0, 0
        for at, source in enumerate(sources):
            asked = source.params.logprobs
            if asked is None:
                untold += int((ranks[number, at] != _UNTOUCHED).sum())
                continue
            right = raw[at].double().log_softmax(-1).cpu()
            top = named[number, at, 1 : asked + 1]
            found, own = values[number, at, : asked + 1].double(), right[tokens[at]]
            best = right.topk(min(asked, right.numel())).values
            errors = (
                found[:1] - own,
                found[1:] - best,
                right[top] - best,
                named[number, at, :1] - tokens[at],
            )
            largest = max(largest, _largest(torch.cat(errors)))
            # Tokens equal to within rounding may be counted either way.
            fewest = int((right > own + _LOGPROB_ERROR).sum()) + 1
            most = int((right > own - _LOGPROB_ERROR).sum())
            wrong += not fewest <= int(ranks[number, at]) <= max(1, most)
        yield "logprobs", largest, _LOGPROB_ERROR, ""
        yield "ranks", float(wrong), 0.0, ""
        yield "logprobs of others", float(untold), 0.0, ""


@dataclass(frozen=True)
class _State:
    """What a sampling graph may change, or must not."""

    lengths: Tensor
    last_tokens: Tensor
    generated: Tensor


class _EveryThird:
    """A grammar that allows every third token."""

    def __init__(self, first: int) -> None:
        self._first = first

    def allowed(self, vocab: int) -> Tensor:
        """bool [vocab]."""
        return torch.arange(vocab) % 3 == self._first

    def fill(self, mask: IntArray) -> None:
        """As `FollowedText.fill`: a bit for each token, the lowest first."""
        bits = self.allowed(32 * mask.size).numpy().reshape(-1, 32)
        mask[:] = np.packbits(bits, axis=1, bitorder="little").view(np.int32).reshape(mask.shape)


def _told(params: SamplingParams) -> str:
    """The parameters that differ from the defaults."""
    default = SamplingParams()
    names = [field.name for field in fields(params)]
    given = {name: getattr(params, name) for name in names if getattr(params, name) != getattr(default, name)}
    return ", ".join(f"{name}={value}" for name, value in given.items())


def _largest(error: Tensor) -> float:
    return float(error.abs().max().nan_to_num(nan=float("inf")))
