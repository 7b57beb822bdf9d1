"""Which part of a growing output a reader is shown each time: all so far, what is new, or only the end."""

from __future__ import annotations

from ..outputs import CompletionOutput, RequestOutput
from ..sampling_params import RequestOutputKind


class OutputView:
    """One reader's view of one request."""

    def __init__(self, kind: RequestOutputKind) -> None:
        self._kind = kind
        self._seen: dict[int, tuple[int, int]] = {}
        """By completion: tokens and characters that were shown."""
        self._over: set[int] = set()

    def of(self, output: RequestOutput) -> RequestOutput | None:
        """What to show of an output that stays as it is; None if nothing."""
        if self._kind is RequestOutputKind.CUMULATIVE:
            return output
        if self._kind is RequestOutputKind.FINAL_ONLY:
            return output if output.finished else None
        news = [new for completion in output.outputs if (new := self._since(completion)) is not None]
        if not news and not output.finished:
            return None
        return _Delta.of(output, news)

    def _since(self, completion: CompletionOutput) -> CompletionOutput | None:
        tokens, characters = self._seen.get(completion.index, (0, 0))
        ids, text = completion.token_ids[tokens:], completion.text_since(characters)
        ends = completion.finish_reason is not None and completion.index not in self._over
        if not ids and not text and not ends:
            return None
        self._seen[completion.index] = tokens + len(ids), characters + len(text)
        if ends:
            self._over.add(completion.index)
        new = CompletionOutput(
            completion.index,
            token_ids=ids,
            finish_reason=completion.finish_reason,
            stop_reason=completion.stop_reason,
        )
        new.text = text  # type: ignore[assignment]
        if completion.logprobs is not None:
            new.logprobs = completion.logprobs[tokens:]
        return new


class _Delta(RequestOutput):
    """Holds only completions with news, so whether all have ended is told apart."""

    @classmethod
    def of(cls, output: RequestOutput, news: list[CompletionOutput]) -> _Delta:
        delta = cls(
            output.request_id,
            output.prompt,
            output.prompt_token_ids,
            news,
            output.prompt_logprobs,
            output.num_cached_tokens,
            output.error,
            output.metrics,
        )
        delta._is_over = output.finished
        return delta

    _is_over = False

    @property
    def finished(self) -> bool:
        """Whether every completion of the request has ended."""
        return self._is_over
