"""What the text must match, under vLLM's older name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ostinato.text.structured import StructuredOutputs

from .parameter_checks import RequestError

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
