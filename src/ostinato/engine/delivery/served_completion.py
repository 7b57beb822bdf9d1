"""A completion being served: the request that computes it, and the output that it fills."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..outputs import CompletionOutput, RequestOutput
from ..scheduling.request import Request
from ..stepping.prompt_states import PromptStates
from .completion_text import CompletionText


@dataclass(frozen=True, eq=False, slots=True)
class ServedCompletion:
    """One of a prompt's completions, or its embedding."""

    request: Request
    whole: RequestOutput
    """The output of the prompt; `output` is in it."""
    output: CompletionOutput
    token_ids: list[int]
    """Those of `output`; new tokens are appended here."""
    text: CompletionText | None = None
    """The text of `token_ids`; None if no text is wanted."""
    has_stops: bool = False
    """Whether `stop_string` must be called after every token."""
    has_siblings: bool = False
    """Whether the same prompt has other completions."""
    states: list[PromptStates] = field(default_factory=list)
    """For an embedding: the states of its prompt, once computed."""

    def stop_string(self, ended: tuple[Request, ...]) -> str | None:
        """The stop string that the last token completed, if any; `ended`: the requests that it ended."""
        assert self.text is not None
        assert self.request.params is not None
        if self._ended_by_token and self.request in ended:
            return None
        stop = self.text.find_stop(may_stop=len(self.token_ids) > self.request.params.min_tokens)
        if stop is not None:
            # The same token may have reached max_tokens; the stop string is the more specific reason.
            self.output.finish_reason, self.output.stop_reason = "stop", stop
        return stop

    def end(self) -> None:
        """No further token comes: settle the text, and set why it ended."""
        request, output, text = self.request, self.output, self.text
        if text is not None:
            if output.finish_reason is None:
                stop = text.finish(without_last=self._ended_by_token)
                if stop is not None and request.finish_reason == "length":
                    output.finish_reason, output.stop_reason = "stop", stop
            output.text = text.text
        if output.finish_reason is None:
            assert request.finish_reason is not None
            output.finish_reason, output.stop_reason = request.finish_reason.value, request.stop_reason
            self.whole.error = self.whole.error or request.error
        self.whole.num_cached_tokens = max(self.whole.num_cached_tokens, request.num_cached_tokens)

    def fail(self, error: str) -> None:
        """End it as it is, with an error: its results could not be delivered."""
        self.output.finish_reason, self.output.stop_reason = "error", None
        self.whole.error = self.whole.error or error

    @property
    def _ended_by_token(self) -> bool:
        """Whether its last token is a stop token and not part of the text."""
        request = self.request
        if request.finish_reason != "stop" or request.params is None:
            return False
        return not request.params.include_stop_str_in_output
