"""From the results of a step to the outputs.

Most steps give the same requests a token each and nothing else. So the destinations of the tokens are
computed when the batch changes, and whatever concerns only a few requests (stop strings, logprobs, the end)
is handled separately. Text without stop strings is made when it is read (`CompletionText`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from ostinato.text.tokenizer import Tokenizer

from ..outputs import Logprob, RequestOutput
from ..scheduling.request import Request
from ..scheduling.request_drafts import RequestDrafts
from ..stepping.flight import Extras, Progress
from .served_completion import ServedCompletion


@dataclass(frozen=True)
class _Batch:
    """Where the tokens of these requests go."""

    requests: tuple[Request, ...]
    token_ids: list[list[int]]
    """The lists that get the token of each."""
    watched: list[ServedCompletion]
    """Those with stop strings."""
    outputs: list[RequestOutput]
    """The outputs that grow, each once."""


_NOBODY = _Batch((), [], [], [])


class Delivery:
    """The completions being served, by the requests that compute them."""

    def __init__(self, tokenizer: Tokenizer | None, finish: Callable[[Request, str], None]) -> None:
        """`finish` ends a request whose text contains this stop string."""
        self._tokenizer = tokenizer
        self._finish = finish
        self._token_texts: dict[int, str] = {}
        """Texts of single tokens, as far as log-probabilities needed them."""
        self._completions: dict[Request, ServedCompletion] = {}
        self._batch = _NOBODY

    def add(self, completion: ServedCompletion) -> None:
        """From now on, the results of its request go to this completion."""
        self._completions[completion.request] = completion

    def remove(self, completion: ServedCompletion) -> None:
        """Stop delivering to this completion."""
        self._completions.pop(completion.request, None)
        self._batch = _NOBODY

    def take_in(self, steps: Sequence[Progress]) -> tuple[list[RequestOutput], list[RequestOutput]]:
        """The outputs that grew or ended with these steps, and those of them that are now complete."""
        changed: list[RequestOutput] = []
        over: list[ServedCompletion] = []
        for at, step in enumerate(steps):
            # There are several if drafts were accepted, if several steps were awaited, or if a launch failed,
            # whose requests end without a token. A completion that a stop string has just ended may be among
            # them: it stays as it is.
            told = step.without_tokens_of({completion.request for completion in over}) if over else step
            grown, ended = self._take_in(told, is_first=not at)
            changed = _each_once([*changed, *grown]) if changed else grown
            over += ended
        if not over:
            return changed, []
        return changed, _each_once([completion.whole for completion in over if completion.whole.finished])

    def fail(
        self, steps: Sequence[Progress], error: str, abort: Callable[[str], bool]
    ) -> list[RequestOutput]:
        """Called if `take_in` raised: the requests in these steps end with `error`. Returns their outputs."""
        self._batch = _NOBODY
        concerned = {request for step in steps for request in (*step.requests, *step.ended, *step.extras)}
        wholes = _each_once(
            [self._completions[request].whole for request in concerned if request in self._completions]
        )
        for completion in self._completions.values():
            if any(completion.whole is whole for whole in wholes):
                abort(completion.request.request_id)
                completion.fail(error)
        return wholes

    def _take_in(
        self, step: Progress, *, is_first: bool
    ) -> tuple[list[RequestOutput], Iterable[ServedCompletion]]:
        requests, tokens, ended, extras = step
        batch = self._batch
        if batch.requests is not requests:
            batch = self._batch_of(requests)
            if is_first:  # later parts of a step have other requests each time
                self._batch = batch
        for token_ids, token in zip(batch.token_ids, tokens, strict=True):
            token_ids.append(token)
        stopped = [completion for completion in batch.watched if self._stops(completion, ended)]
        if not stopped and not ended and not extras:
            return batch.outputs.copy(), ()
        others = {request: self._completions[request] for request in (*extras, *ended)}
        for request, more in extras.items():
            self._add_extras(others[request], more)
        over = dict.fromkeys([*stopped, *(others[request] for request in ended)])
        for completion in over:
            completion.end()
            if completion.request.drafts is not None:
                _tell_drafts(completion)
        without_token = [others[request].whole for request in others.keys() - set(requests)]
        return _each_once([*batch.outputs, *without_token]) if without_token else batch.outputs.copy(), over

    def _batch_of(self, requests: tuple[Request, ...]) -> _Batch:
        completions = [self._completions[request] for request in requests]
        outputs = [completion.whole for completion in completions]
        # A first token always changes the batch, so it is noticed here.
        now = time.monotonic()
        for output in outputs:
            if output.metrics is not None and not output.metrics.first_token_ts:
                output.metrics.first_token_ts = now
        if [completion for completion in completions if completion.has_siblings]:
            outputs = _each_once(outputs)
        return _Batch(
            requests,
            [completion.token_ids for completion in completions],
            [completion for completion in completions if completion.has_stops],
            outputs,
        )

    def _stops(self, completion: ServedCompletion, ended: tuple[Request, ...]) -> bool:
        """Whether a stop string is complete, which ends the request."""
        stop = completion.stop_string(ended)
        if stop is not None:
            self._finish(completion.request, stop)
        return stop is not None

    def _add_extras(self, completion: ServedCompletion, extras: Extras) -> None:
        output, whole = completion.output, completion.whole
        if extras.hidden is not None:
            completion.states.append(extras.hidden)
        if extras.prompt_logprobs is not None and output.index == 0:
            assert whole.prompt_logprobs is not None
            # Snapshots share the list, so it is replaced.
            grown = whole.prompt_logprobs = whole.prompt_logprobs.copy()
            # By position: a preempted request computes its prompt again.
            for position, found in extras.prompt_logprobs.items():
                grown[position] = self._named(found)
        if extras.logprobs is not None:
            assert output.logprobs is not None
            output.logprobs.append(self._named(extras.logprobs))

    def _named(self, logprobs: dict[int, Logprob]) -> dict[int, Logprob]:
        if self._tokenizer is None:
            return logprobs
        return {
            token: Logprob(entry.logprob, entry.rank, self._text_of(token))
            for token, entry in logprobs.items()
        }

    def _text_of(self, token: int) -> str:
        assert self._tokenizer is not None
        text = self._token_texts.get(token)
        if text is None:
            text = self._tokenizer.token_text(token)
            self._token_texts[token] = text
        return text


def _tell_drafts(completion: ServedCompletion) -> None:
    """Add the counts of drafts to the output's metrics."""
    told, drafts = completion.whole.metrics, completion.request.drafts
    if told is not None and drafts is not None:
        told.speculative_decoding = told.speculative_decoding or RequestDrafts()
        told.speculative_decoding.join(drafts)


def _each_once(outputs: list[RequestOutput]) -> list[RequestOutput]:
    return list(dict(zip(map(id, outputs), outputs, strict=True)).values())
