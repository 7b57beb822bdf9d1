"""Which part of a growing output the reader of a stream gets, and when."""

from __future__ import annotations

from collections import defaultdict

from ..outputs import CompletionOutput, RequestOutput
from ..parameters.sampling_params import RequestOutputKind, SamplingParams


class OutputStream:
    """The stream of one request: `SamplingParams.output_kind` and `stream_interval`."""

    def __init__(self, params: SamplingParams) -> None:
        self._kind = params.output_kind
        self._interval = params.stream_interval or 1
        self._num_told = 0
        self._tokens: defaultdict[int, int] = defaultdict(int)
        """Tokens and characters already sent, by completion."""
        self._characters: defaultdict[int, int] = defaultdict(int)

    def news(self, output: RequestOutput) -> RequestOutput | None:
        """What to send now that the output has grown, as a copy that will not change; None: nothing yet."""
        if not output.finished and not self._is_due(output):
            return None
        taken = output.snapshot()
        if self._kind is RequestOutputKind.DELTA:
            taken.outputs = [self._new_part(each) for each in output.outputs]
        return taken

    def _is_due(self, output: RequestOutput) -> bool:
        """While it runs: true after its first tokens, and then after every `stream_interval` more."""
        if self._kind is RequestOutputKind.FINAL_ONLY:
            return False
        if self._interval == 1:
            return True
        count = sum([len(each.token_ids) for each in output.outputs])
        is_due = not self._num_told or count - self._num_told >= self._interval
        self._num_told = count if is_due else self._num_told
        return is_due

    def _new_part(self, output: CompletionOutput) -> CompletionOutput:
        at = output.index
        begin, self._tokens[at] = self._tokens[at], len(output.token_ids)
        text = output.text_since(self._characters[at])
        self._characters[at] += len(text)
        part = CompletionOutput(
            at,
            token_ids=output.token_ids[begin:],
            logprobs=None if output.logprobs is None else output.logprobs[begin:],
            finish_reason=output.finish_reason,
            stop_reason=output.stop_reason,
        )
        part.text = text  # type: ignore[assignment]
        return part
