"""What the text of an answer must look like, as request bodies ask for it."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from .body import Body, Text

Schema = dict[str, Any] | Annotated[str, Field(min_length=1, max_length=65536)]
"""A JSON schema, as an object or as text."""
Choice = Annotated[str, Field(min_length=1, max_length=2048)]
Choices = Annotated[list[Choice], Field(min_length=1, max_length=1024)]
Regex = Annotated[str, Field(min_length=1, max_length=2048)]
Grammar = Annotated[str, Field(min_length=1, max_length=16384)]


class TextFormat(Body):
    """Free text."""

    type: Literal["text"]


class JsonObjectFormat(Body):
    """Any JSON object."""

    type: Literal["json_object"]


class JsonSchema(Body):
    """A schema with a name."""

    name: Text | None = None
    description: str | None = None
    schema_: Annotated[dict[str, Any], Field(alias="schema")]
    strict: bool | None = None
    """Schemas are always followed to the letter."""


class JsonSchemaFormat(Body):
    """JSON that a schema describes."""

    type: Literal["json_schema"]
    json_schema: JsonSchema


class RegexFormat(Body):
    """Text that a regular expression matches from beginning to end."""

    type: Literal["regex"]
    regex: Regex


class GrammarFormat(Body):
    """Text of a context-free grammar in EBNF whose first rule is `root`."""

    type: Literal["grammar"]
    grammar: Grammar


class TaggedPart(Body):
    """A part of an answer, between two texts."""

    begin: Text
    schema_: Annotated[dict[str, Any], Field(alias="schema")]
    end: str


class StructuralTagFormat(Body):
    """Free text with parts in it that are held to something: as xgrammar's `format`, or in its older form."""

    type: Literal["structural_tag"]
    format: dict[str, Any] | None = None
    structures: Annotated[list[TaggedPart], Field(max_length=128)] | None = None
    triggers: Annotated[list[Text], Field(max_length=128)] | None = None
    """Behind each of these one of the structures follows."""


ResponseFormat = Annotated[
    TextFormat | JsonObjectFormat | JsonSchemaFormat | RegexFormat | GrammarFormat | StructuralTagFormat,
    Field(discriminator="type"),
]


class StructuredOutputsField(Body):
    """vLLM's `structured_outputs`: one of these."""

    json_: Annotated[Schema | None, Field(alias="json")] = None
    json_object: bool | None = None
    regex: Regex | None = None
    choice: Choices | None = None
    grammar: Grammar | None = None
    structural_tag: Annotated[str, Field(min_length=1, max_length=65536)] | None = None
    """As JSON text."""
