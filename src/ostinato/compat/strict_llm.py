"""`vllm.LLM`: Ostinato's, but handling prompts that cannot be served as vLLM does."""

from __future__ import annotations

from typing import Any

from ostinato.engine.llm import LLM as _LLM
from ostinato.engine.outputs import RequestOutput
from ostinato.engine.parameters.sampling_params import RequestError


class LLM(_LLM):
    """As `ostinato.LLM`, except that one bad prompt in a list fails the whole call. Callers written for vLLM
    do not check `error` in outputs, and would continue with an empty one."""

    def generate(self, *args: Any, **kwargs: Any) -> list[RequestOutput]:
        """As `ostinato.LLM.generate`, but raises RequestError, a ValueError, if a prompt cannot be served."""
        return _all_served(super().generate(*args, **kwargs))

    def chat(self, *args: Any, **kwargs: Any) -> list[RequestOutput]:
        """The same for conversations."""
        return _all_served(super().chat(*args, **kwargs))

    def wait_for_completion(self, **kwargs: Any) -> list[RequestOutput]:
        """The same for queued prompts."""
        return _all_served(super().wait_for_completion(**kwargs))


def _all_served(outputs: list[RequestOutput]) -> list[RequestOutput]:
    for at, output in enumerate(outputs):
        if output.error is not None:
            raise RequestError(f"prompt {at} of {len(outputs)}: {output.error}")
    return outputs
