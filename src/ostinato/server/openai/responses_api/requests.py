"""The body of `/v1/responses`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, model_validator

from ..body import Body, Count, Label, Text
from ..requests import Sampling
from ..shapes import JsonObjectFormat, TextFormat

_TEXTS = ("input_text", "output_text", "text")


class Part(Body):
    """A piece of a message or of a function's output. Only text is supported."""

    type: Literal["input_text", "output_text", "text"]
    text: str
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None

    @model_validator(mode="before")
    @classmethod
    def _is_text(cls, given: Any) -> Any:
        if isinstance(given, dict) and isinstance(given.get("type"), str) and given["type"] not in _TEXTS:
            raise ValueError(f"a part of type {given['type'][:40]!r} cannot be read here, only text")
        return given


Parts = str | Annotated[list[Part], Field(fail_fast=True)]


class MessageItem(Body):
    """What somebody said."""

    type: Literal["message"] | None = None
    role: Literal["user", "assistant", "system", "developer"]
    content: Parts
    id: Label | None = None
    status: Label | None = None
    phase: Label | None = None


class FunctionCallItem(Body):
    """A function that the model called."""

    type: Literal["function_call"]
    call_id: Text
    name: Text
    arguments: str
    id: Label | None = None
    status: Label | None = None


class FunctionOutputItem(Body):
    """What the function answered."""

    type: Literal["function_call_output"]
    call_id: Text
    output: Parts
    id: Label | None = None
    name: Label | None = None
    status: Label | None = None


def _kind(given: Any) -> str | None:
    kind = given.get("type", "message") if isinstance(given, dict) else getattr(given, "type", "message")
    return kind if kind in ("message", "function_call", "function_call_output") else None


Item = Annotated[
    Annotated[MessageItem, Tag("message")]
    | Annotated[FunctionCallItem, Tag("function_call")]
    | Annotated[FunctionOutputItem, Tag("function_call_output")],
    Discriminator(
        _kind,
        custom_error_type="unknown_item",
        custom_error_message="only messages, function calls and outputs of functions can be read here",
    ),
]


class FunctionTool(Body):
    """A function the model may call."""

    type: Literal["function"]
    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.\-]{1,64}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class NamedFunction(Body):
    """A function by its name."""

    type: Literal["function"]
    name: str


class AllowedFunctions(Body):
    """Let only some of the tools be called."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedFunction], Field(min_length=1, max_length=128)]


class NamedSchemaFormat(Body):
    """JSON that a schema describes."""

    type: Literal["json_schema"]
    name: Text | None = None
    description: str | None = None
    schema_: Annotated[dict[str, Any], Field(alias="schema")]
    strict: bool | None = None


class TextOptions(Body):
    """What the text must look like."""

    format: (
        Annotated[TextFormat | JsonObjectFormat | NamedSchemaFormat, Field(discriminator="type")] | None
    ) = None
    verbosity: Label | None = None
    """Changes nothing."""


class Reasoning(Body):
    """How much to think; chat templates that know `reasoning_effort` get it."""

    effort: Label | None = None
    summary: Label | None = None
    generate_summary: Label | None = None


class ResponsesRequest(Sampling):
    """The body of `/v1/responses`: OpenAI's fields, and those of a chat that are not OpenAI's."""

    input: Text | Annotated[list[Item], Field(min_length=1, fail_fast=True)]
    instructions: str | None = None
    max_output_tokens: Count | None = None
    max_tool_calls: Count | None = None
    """Counts tools that a server runs; there are none here."""
    n: Literal[1] | None = None
    tools: Annotated[list[FunctionTool], Field(max_length=128)] | None = None
    tool_choice: Literal["auto", "none", "required"] | NamedFunction | AllowedFunctions | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: Reasoning | None = None
    include: Annotated[list[Label], Field(max_length=64)] | None = None
    """`message.output_text.logprobs` acts; the rest is about tools that are not here."""
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    truncation: Literal["disabled"] | None = None
    background: Literal[False] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
