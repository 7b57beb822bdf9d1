"""What the text of an answer must look like, as specified by a caller."""

from __future__ import annotations

import json as json_text
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .errors import GrammarError

_KINDS = ("json", "json_object", "regex", "choice", "grammar", "structural_tag")


@dataclass(frozen=True)
class StructuredOutputs:
    """Exactly one of these must be set; names and order are vLLM's."""

    json: Any = None
    """A JSON schema: as a string, as an object, or as a pydantic model."""
    regex: str | None = None
    """A regular expression that the whole text matches."""
    choice: Sequence[str] | None = None
    """The possible answers."""
    grammar: str | None = None
    """A context-free grammar in EBNF, beginning at the rule `root`."""
    json_object: bool | None = None
    """Any JSON object."""
    disable_any_whitespace: bool = False
    """Refused: whitespace between the parts of JSON is the model's choice."""
    disable_additional_properties: bool = False
    """No effect: objects have only the properties in their schema, unless it allows others."""
    whitespace_pattern: str | None = None
    """Refused, as above."""
    structural_tag: str | None = None
    """Free text with parts that follow schemas, in xgrammar's JSON. A part of type `json_schema` may have
    `"strict": false`, with the meaning of `strict` below."""
    strict: bool = True
    """Refuse a JSON schema with a rule that cannot be enforced; False: enforce the rest of the schema."""

    def __post_init__(self) -> None:
        if self.choice is not None:
            self._write_choice()
        given = [name for name in _KINDS if getattr(self, name) not in (None, False)]
        given = [name for name in given if name != "grammar" or self.choice is None]
        if len(given) != 1:
            told = " and ".join(given) or "nothing"
            raise GrammarError(f"structured outputs need exactly one of {', '.join(_KINDS)}, not {told}")
        for name in ("disable_any_whitespace", "whitespace_pattern"):
            if getattr(self, name):
                raise GrammarError(f"structured outputs: {name} is not supported: leave it out")
        object.__setattr__(self, "json", _schema_text(self.json))
        for name in ("json", "regex", "grammar", "structural_tag"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, str) or not value.strip()):
                raise GrammarError(f"structured outputs: {name} must be a non-empty string")

    @property
    def kind_and_text(self) -> tuple[str, str]:
        """Which field is set, and its text; empty for json_object. Choices are a grammar."""
        kind = next(name for name in _KINDS if name != "choice" and getattr(self, name))
        if kind == "json_object":
            return kind, ""
        return "loose_json" if kind == "json" and not self.strict else kind, getattr(self, kind)

    def _write_choice(self) -> None:
        """Write the choices as a grammar too; a copy then has both."""
        written = choice_grammar(self.choice)
        if self.grammar not in (None, written):
            raise GrammarError(
                f"structured outputs need exactly one of {', '.join(_KINDS)}, not choice and grammar"
            )
        object.__setattr__(self, "choice", tuple(self.choice or ()))
        object.__setattr__(self, "grammar", written)


def choice_grammar(choices: object) -> str:
    """A grammar that matches one of these texts."""
    is_list = isinstance(choices, Sequence) and not isinstance(choices, str)
    if not is_list or not choices or not all(isinstance(choice, str) for choice in choices):  # type: ignore[attr-defined]
        raise GrammarError(f"structured outputs: choice must be a list of strings, not {choices!r}")
    written = [json_text.dumps(choice, ensure_ascii=False) for choice in choices]  # type: ignore[attr-defined]
    return f"root ::= {' | '.join(written)}"


def _schema_text(schema: Any) -> str | None:
    if schema is None or isinstance(schema, str):
        return schema
    if callable(made := getattr(schema, "model_json_schema", None)):
        schema = made()
    if not isinstance(schema, Mapping):
        raise GrammarError(f"structured outputs: json must be a schema, not {schema!r}")
    try:
        return json_text.dumps(schema)
    except (TypeError, ValueError, RecursionError) as error:
        raise GrammarError(f"structured outputs: json is not a schema: {error}") from error
