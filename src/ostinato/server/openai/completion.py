"""One completion as it grows: tokens from the engine in, text and logprobs for the client out."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from ostinato.engine.delivery.completion_text import CompletionText
from ostinato.engine.parameters.sampling_params import SamplingParams

from ..engine_client.client import EngineClient, EngineGone
from ..tenants.tenant import current_tenant, salted
from ..wire.messages import News, TokenLogprobs
from .draft_metrics import Drafts
from .errors import ApiError, engine_error, unavailable
from .served_model import ServedModel


@dataclass
class Piece:
    """What has come since the last piece was taken."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to show."""
        return not self.text and not self.token_ids and not self.logprobs


class Completion:
    """Listens to one engine request. Text is made here, so stop strings are found here too."""

    def __init__(
        self,
        index: int,
        prompt_ids: list[int],
        params: SamplingParams,
        model: ServedModel,
        *,
        number: int = 0,
        keeps_output: bool = True,
        shape_param: str = "response_format",
        cache_salt: str | None = None,
        wakes_every: int = 0,
        on_token: Callable[[Completion, float], None] | None = None,
    ) -> None:
        """`params`: those of all completions of the prompt; this is the one of this `number`.
        `keeps_output=False`: the prompt alone is wanted, what comes behind it is dropped. `shape_param`:
        the field at fault if the shape of the answer cannot be followed. `cache_salt`: only with the same one
        do requests share prefixes.

        `wakes_every`: after so many tokens the reader is told, 0 for only at the end; the first token is
        told in any case to whoever is told of tokens at all. `on_token` is called with the seconds since the
        token before, or since the start.
        """
        self.index = index
        self.prompt_ids = prompt_ids
        self.params = params.seeded(number)
        self.num_tokens = 0
        self.num_cached_tokens = 0
        self.queued_seconds = 0.0
        """How long it waited for its first step."""
        self.drafts: Drafts | None = None
        """Known at its end."""
        self.prompt_logprobs: dict[int, TokenLogprobs] = {}
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self.error: ApiError | None = None
        self.started_at = time.perf_counter()
        self.first_token_at: float | None = None
        self.last_token_at: float | None = None
        self.num_received = 0
        """Tokens that came, those dropped included."""
        self.params_of_prompt, self.number = params, number
        """Shared by all completions of the prompt, whose lists these are; and which of them it is."""
        self._keeps_output = keeps_output
        self._shape_param = shape_param
        self._cache_salt = salted(cache_salt)
        self.tenant = current_tenant.get()
        self._model = model
        self._wakes_every = wakes_every
        self._on_token = on_token
        self._piece = Piece()
        self._shown = 0
        detokenizer = model.detokenizer(prompt_ids, skip_special_tokens=params.skip_special_tokens)
        include_stop = params.include_stop_str_in_output
        self._text = (
            CompletionText(detokenizer, [], params.stop or (), include_stop=include_stop)
            if detokenizer
            else None
        )
        self._engine: EngineClient | None = None
        self._last_weights: str | None = None
        self._id = -1
        self._on_change: Callable[[], None] = lambda: None
        self._on_more: Callable[[], None] = lambda: None

    @property
    def is_finished(self) -> bool:
        """Whether nothing more will come."""
        return self.finish_reason is not None

    @property
    def weight_version(self) -> str:
        """Of the weights that the last token was computed with."""
        if self._last_weights is not None or self._engine is None:
            return self._last_weights or ""
        return self._engine.standing.weight_version

    @staticmethod
    def start(
        completions: Sequence[Completion],
        engine: EngineClient,
        on_change: Callable[[], None],
        on_more: Callable[[], None],
    ) -> None:
        """Asks the engine for completions, those of one prompt together: they share their lists.

        `on_change` is called at the first token of each and at its end, `on_more` in between.
        """
        for completion in completions:
            completion._engine, completion._on_change, completion._on_more = engine, on_change, on_more
        for group in _of_one_prompt(completions):
            first = group[0]
            params = first.params_of_prompt.seeded(0)
            params.stop = []  # these stay here
            adapter = first._model.adapter
            salt, tenant = first._cache_salt, first.tenant
            ids = engine.generate(first.prompt_ids, params, group, salt, adapter, tenant)
            for completion, id in zip(group, ids, strict=True):
                completion._id = id

    def abort(self) -> None:
        """Have the engine end it; it then finishes with `abort`."""
        if not self.is_finished and self._engine is not None:
            self._engine.abort([self._id])

    def close(self) -> None:
        """Nobody listens any more."""
        if not self.is_finished and self._engine is not None:
            self._engine.forget([self._id])
            self.finish_reason = "abort"

    def take(self) -> Piece:
        """What has come since the last time."""
        taken, self._piece = self._piece, Piece()
        if self._text is not None:
            taken.text = self._text.since(self._shown)
            self._shown += len(taken.text)
        return taken

    # -- as a listener -----------------------------------------------------------------------------

    def take_token(self, token: int) -> None:
        """The next token, and nothing else."""
        if not self.is_finished:
            self._take_token(token, None, may_be_text=True)
            self._wake()

    def take_in(self, news: News) -> None:
        """One step's news."""
        if self.is_finished:
            return
        self.num_cached_tokens = max(self.num_cached_tokens, news.cached_tokens)
        self.queued_seconds = max(self.queued_seconds, news.queued_seconds)
        if news.drafts is not None:
            self.drafts = news.drafts
        if news.prompt_logprobs is not None:
            self.prompt_logprobs.update(news.prompt_logprobs)
        if news.token is not None:
            # The token that ended it is no text of the answer, be it a stop token or the end of the sequence.
            is_text = news.finish_reason != "stop" or self.params.include_stop_str_in_output
            self._take_token(news.token, news.logprobs, may_be_text=is_text)
        if news.finish_reason is not None and not self.is_finished:
            self._finish(news)
        self._wake()

    def _wake(self) -> None:
        every, behind_first = self._wakes_every, self.num_received - 1
        if self.is_finished or (every and behind_first <= 0):
            self._on_change()
        elif every and behind_first % every == 0:
            self._on_more()

    def fail(self, error: EngineGone) -> None:
        """The engine is gone."""
        if not self.is_finished:
            self.finish_reason, self.error = "error", unavailable(str(error))
            self._on_change()

    def _take_token(self, token: int, logprobs: TokenLogprobs | None, *, may_be_text: bool) -> None:
        now = time.perf_counter()
        since = now - (self.last_token_at or self.started_at)
        self.first_token_at = self.first_token_at or now
        self.last_token_at = now
        self.num_received += 1
        self.tenant.take_token()
        if self._on_token is not None:
            self._on_token(self, since)
        if not self._keeps_output:
            return
        self.num_tokens += 1
        self._piece.token_ids.append(token)
        if logprobs is not None:
            self._piece.logprobs.append(logprobs)
        if self._text is None or not may_be_text:
            return
        stop = self._text.push(token, may_stop=self.num_tokens > self.params.min_tokens)
        if stop is not None:
            self._stop_at(stop)

    def _error_of(self, news: News, message: str) -> ApiError:
        if news.lacks_adapter:
            return self._model.without_its_adapter()
        param = self._param_at_fault(message) if news.refused else None
        return engine_error(message, refused=news.refused, param=param)

    def _param_at_fault(self, error: str) -> str | None:
        """The field that the engine's words begin with, or that of the shape."""
        fields = ("allowed_token_ids", "bad_words", "min_tokens", "logit_bias")
        named = next((name for name in fields if error.startswith(name)), None)
        return named or (None if self.params.structured_outputs is None else self._shape_param)

    def _stop_at(self, stop: str) -> None:
        self.finish_reason, self.stop_reason = "stop", stop
        assert self._engine is not None
        self._last_weights = self._engine.standing.weight_version
        self._engine.forget([self._id])

    def _finish(self, news: News) -> None:
        self._last_weights = self.weight_version
        if news.error is not None:
            self.error = self._error_of(news, news.error)
        stop = self._text.finish() if self._text is not None else None
        if stop is not None and news.finish_reason == "length":
            self.finish_reason, self.stop_reason = "stop", stop
        else:
            self.finish_reason, self.stop_reason = news.finish_reason, news.stop_reason


def _of_one_prompt(completions: Sequence[Completion]) -> Iterator[list[Completion]]:
    """Groups completions in their order: one group for each prompt, numbered from zero."""
    group: list[Completion] = []
    for completion in completions:
        if group and not (
            completion.params_of_prompt is group[0].params_of_prompt
            and completion.prompt_ids is group[0].prompt_ids
            and completion.number == len(group)
        ):
            yield group
            group = []
        group.append(completion)
    if group:
        yield group
