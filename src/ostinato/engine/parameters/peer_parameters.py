"""vLLM's parameters for which `SamplingParams` has no field: other names, no-ops, and refusals that say what
to use instead; and guided decoding, its older name for structured outputs."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, TypeVar

from ostinato.text.structured import StructuredOutputs

from .parameter_checks import RequestError

_Class = TypeVar("_Class", bound=type)

_ASK_FOR_NOTHING: dict[str, tuple[Any, ...]] = {
    "best_of": (None,),
    "early_stopping": (None, False),
    "length_penalty": (None, 1.0),
    "repetition_detection": (None,),
    "routed_experts_prompt_start": (None, 0),
    "skip_clone": (None, False, True),
    "thinking_token_budget": (None, -1),
    "trace_decode_token_ids": (None,),
    "use_beam_search": (None, False),
}
"""Values that request what happens anyway."""

_INSTEAD = {
    "best_of": "extra completions are not generated and discarded: use n",
    "early_stopping": "it applies to beams: use LLM.beam_search",
    "length_penalty": "it applies to beams: use LLM.beam_search with BeamSearchParams",
    "repetition_detection": "repetition does not end a request: use repetition_penalty or stop",
    "routed_experts_prompt_start": "experts are not reported",
    "thinking_token_budget": "thinking tokens are not counted separately: use max_tokens",
    "trace_decode_token_ids": "tokens cannot be forced: use allowed_token_ids or structured_outputs",
    "use_beam_search": "use LLM.beam_search with BeamSearchParams",
}


def takes_peer_names(params: _Class) -> _Class:
    """Let a class of parameters accept these names: `guided_decoding` as `structured_outputs`; the others
    with values that request nothing. Otherwise it raises RequestError that says what to use instead."""
    own = params.__init__  # type: ignore[misc]

    @functools.wraps(own)
    def made(self: Any, *args: Any, **given: Any) -> None:
        for name in _ASK_FOR_NOTHING.keys() & given.keys():
            _check(name, given.pop(name), given.get("n", args[0] if args else 1))
        if "guided_decoding" in given:
            wanted = given.pop("guided_decoding")
            if wanted is not None and given.get("structured_outputs") is not None:
                raise RequestError("guided_decoding is the older name of structured_outputs: give only one")
            if wanted is not None:
                given["structured_outputs"] = wanted
        own(self, *args, **given)

    params.__init__ = made  # type: ignore[misc]
    return params


def _check(name: str, value: Any, n: Any) -> None:
    if value in _ASK_FOR_NOTHING[name] or (name == "best_of" and value == n):
        return
    raise RequestError(f"{name}={value!r}: {_INSTEAD[name]}")


StructuredOutputsParams = StructuredOutputs

_BACKENDS = (None, "auto", "xgrammar")


class GuidedDecodingParams(StructuredOutputs):
    """The older name of `StructuredOutputsParams`, with a choice of backend: xgrammar is the only one."""

    def __init__(
        self,
        json: Any = None,
        regex: str | None = None,
        choice: Sequence[str] | None = None,
        grammar: str | None = None,
        json_object: bool | None = None,
        backend: str | None = None,
        backend_was_auto: bool = False,
        disable_fallback: bool = False,
        disable_any_whitespace: bool = False,
        disable_additional_properties: bool = False,
        whitespace_pattern: str | None = None,
        structural_tag: str | None = None,
    ) -> None:
        """`backend_was_auto` and `disable_fallback` have no effect: there is only one backend."""
        if backend not in _BACKENDS:
            raise RequestError(f"guided_decoding has no backend {backend!r}: use xgrammar, or leave it out")
        super().__init__(
            json,
            regex,
            choice,
            grammar,
            json_object,
            disable_any_whitespace,
            disable_additional_properties,
            whitespace_pattern,
            structural_tag,
        )

    @staticmethod
    def from_optional(
        json: Any = None,
        regex: str | None = None,
        choice: Sequence[str] | None = None,
        grammar: str | None = None,
        json_object: bool | None = None,
        backend: str | None = None,
        whitespace_pattern: str | None = None,
        structural_tag: str | None = None,
    ) -> GuidedDecodingParams | None:
        """None if nothing is specified."""
        if all(each is None for each in (json, regex, choice, grammar, json_object, structural_tag)):
            return None
        return GuidedDecodingParams(
            json,
            regex,
            choice,
            grammar,
            json_object,
            backend,
            whitespace_pattern=whitespace_pattern,
            structural_tag=structural_tag,
        )
