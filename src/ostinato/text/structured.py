"""What the text of an answer must look like, as a caller asks for it."""

from __future__ import annotations

import json as json_text
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .errors import GrammarError

_KINDS = ("json", "json_object", "regex", "grammar", "structural_tag")


@dataclass(frozen=True)
class StructuredOutputs:
    """Exactly one of these; the names are vLLM's."""

    json: str | Mapping[str, Any] | None = None
    """A JSON schema, as text or as an object."""
    json_object: bool = False
    """Any JSON object."""
    regex: str | None = None
    """A regular expression that the whole text matches."""
    grammar: str | None = None
    """A context-free grammar in EBNF, beginning at the rule `root`."""
    structural_tag: str | None = None
    """Free text with parts in it that keep to schemas, in xgrammar's JSON."""

    def __post_init__(self) -> None:
        given = [name for name in _KINDS if getattr(self, name)]
        if len(given) != 1:
            told = " and ".join(given) or "nothing"
            raise GrammarError(f"structured outputs want one of {', '.join(_KINDS)}, not {told}")
        if isinstance(self.json, Mapping):
            try:
                object.__setattr__(self, "json", json_text.dumps(self.json))
            except (TypeError, ValueError, RecursionError) as error:
                raise GrammarError(f"json is no JSON schema: {error}") from None
        text = getattr(self, given[0])
        if given[0] != "json_object" and not isinstance(text, str):
            raise GrammarError(f"{given[0]} of structured outputs is a text, not {type(text).__name__}")

    @property
    def kind_and_text(self) -> tuple[str, str]:
        """Which one it is, and what it says; nothing for json_object."""
        [kind] = [name for name in _KINDS if getattr(self, name)]
        return kind, "" if kind == "json_object" else getattr(self, kind)
