"""Beam search: finds the most likely continuations by generating one token of each beam at a time.

The beams of all prompts go through the engine together; their common beginnings are in the prefix cache.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..delivery.request_progress import RequestProgress, Shown
from ..outputs import Logprob, RequestOutput
from ..parameters.sampling_params import BeamSearchParams, RequestError, SamplingParams

Generate = Callable[[list[dict[str, Any]], SamplingParams], list[RequestOutput]]


@dataclass
class BeamSearchSequence:
    """A continuation."""

    tokens: list[int]
    """Of the prompt and the continuation."""
    logprobs: list[dict[int, Logprob]] = field(default_factory=list)
    """For each token after the prompt: its log probability and those of its alternatives."""
    cum_logprob: float = 0.0
    """Log probability of all tokens together."""
    text: str | None = None
    """Text of all tokens; None if the model has no tokenizer."""
    finish_reason: str | None = None
    """stop: the beam ended by itself; length: it was cut."""

    def then(self, token: int, found: dict[int, Logprob]) -> BeamSearchSequence:
        """This beam with one more token."""
        return BeamSearchSequence(
            [*self.tokens, token], [*self.logprobs, found], self.cum_logprob + found[token].logprob
        )


@dataclass
class BeamSearchOutput:
    """The best continuations of a prompt, best first."""

    sequences: list[BeamSearchSequence]


@dataclass
class _Search:
    """The search for one prompt."""

    prompt: dict[str, Any]
    beams: list[BeamSearchSequence]
    ended: list[BeamSearchSequence] = field(default_factory=list)


class BeamSearch:
    """Searches with one set of parameters."""

    def __init__(
        self,
        params: BeamSearchParams,
        generate: Generate,
        eos: frozenset[int],
        max_logprobs: int,
        max_len: int,
    ) -> None:
        """`generate` completes prompts of token ids, shorter than `max_len` tokens, and returns up to
        `max_logprobs` logprobs per token; -1: any number."""
        if not isinstance(params, BeamSearchParams):
            raise RequestError(f"beam_search takes BeamSearchParams, not {params!r}")
        if 0 <= max_logprobs < 2 * params.beam_width:
            raise RequestError(
                f"beam_width is {params.beam_width}, which needs twice as many logprobs: at most "
                f"{max_logprobs // 2} with max_logprobs={max_logprobs}"
            )
        if params.include_stop_str_in_output:
            raise RequestError("beam_search: include_stop_str_in_output is not supported: decode the tokens")
        if params.structured_outputs is not None:
            raise RequestError("beam_search: structured_outputs are not supported: use generate")
        self._params = params
        self._generate = generate
        self._max_len = max_len
        self._eos = frozenset[int]() if params.ignore_eos else eos
        self._one_token = SamplingParams(
            temperature=0.0,
            max_tokens=1,
            logprobs=2 * params.beam_width,
            detokenize=False,
            ignore_eos=True,
        )

    def run(self, prompts: Sequence[dict[str, Any]], *, shown: Shown = False) -> list[BeamSearchOutput]:
        """The best continuations of `TokensPrompt`s; `shown`: show a progress bar."""
        searches = [
            _Search(prompt, [BeamSearchSequence(list(prompt["prompt_token_ids"]))]) for prompt in prompts
        ]
        with RequestProgress(len(searches), shown) as bar:
            for _ in range(self._params.max_tokens):
                open_before = sum(bool(search.beams) for search in searches)
                if not open_before:
                    break
                self._advance(searches)
                still_open = sum(bool(search.beams) for search in searches)
                bar.update(open_before - still_open, open_before)
            bar.update(sum(bool(search.beams) for search in searches), 0)
        return [self._found(search) for search in searches]

    def _advance(self, searches: list[_Search]) -> None:
        prompts = [
            {**search.prompt, "prompt_token_ids": beam.tokens} for search in searches for beam in search.beams
        ]
        answers = iter(self._generate(prompts, self._one_token))
        for search in searches:
            longer: list[BeamSearchSequence] = []
            for beam in search.beams:
                longer += self._grown(beam, next(answers), search)
            longer.sort(key=self._score, reverse=True)
            search.beams = longer[: self._params.beam_width]

    def _grown(
        self, beam: BeamSearchSequence, answer: RequestOutput, search: _Search
    ) -> list[BeamSearchSequence]:
        """The beam with each of the most likely tokens; finished beams are put aside."""
        told = answer.outputs[0].logprobs
        if not told:
            # Only the model's length limit ends a beam; for a prompt that cannot be served at all, raise.
            if not beam.logprobs or len(beam.tokens) < self._max_len:
                raise RequestError(answer.error or "the request was aborted")
            beam.finish_reason = "length"
            search.ended.append(beam)
            return []
        [found] = told
        grown = []
        for token in found:
            longer = beam.then(token, found)
            if token in self._eos:
                longer.finish_reason = "stop"
                search.ended.append(longer)
            else:
                grown.append(longer)
        return grown

    def _found(self, search: _Search) -> BeamSearchOutput:
        for beam in search.beams:
            beam.finish_reason = "length"
        best = sorted([*search.ended, *search.beams], key=self._score, reverse=True)
        return BeamSearchOutput(best[: self._params.beam_width])

    def _score(self, beam: BeamSearchSequence) -> float:
        length = len(beam.tokens) - (beam.tokens[-1] in self._eos)
        return float(beam.cum_logprob / length**self._params.length_penalty)
