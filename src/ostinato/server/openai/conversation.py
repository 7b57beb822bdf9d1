"""Conversations and tools as request bodies carry them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from .body import Body, Text


class Hinted(Body):
    """What clients that were written for Anthropic's API mark as the end of a beginning to be cached."""

    cache_control: dict[str, Any] | None = None
    """Changes nothing: all beginnings are cached."""


class TextPart(Hinted):
    """A piece of a message. Only text is supported."""

    type: Literal["text"]
    text: str

    @model_validator(mode="before")
    @classmethod
    def _is_text(cls, given: Any) -> Any:
        if isinstance(given, dict) and isinstance(given.get("type"), str) and given["type"] != "text":
            raise ValueError(f"a part of type {given['type'][:40]!r} cannot be read here, only text")
        return given


Content = str | Annotated[list[TextPart], Field(fail_fast=True)]


class SystemMessage(Hinted):
    """What the model is told first."""

    role: Literal["system"]
    content: Content
    name: str | None = None


class DeveloperMessage(Hinted):
    """The newer name of a system message."""

    role: Literal["developer"]
    content: Content
    name: str | None = None


class UserMessage(Hinted):
    """What the user says."""

    role: Literal["user"]
    content: Content
    name: str | None = None


class CalledFunction(Body):
    """A function the model called, with its arguments as JSON text."""

    name: Text
    arguments: str


class MadeToolCall(Body):
    """A tool call of an earlier answer."""

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = None
    """Its place in a stream, which clients send back."""


class AssistantMessage(Hinted):
    """An earlier answer of the model."""

    role: Literal["assistant"]
    content: Content | None = None
    name: str | None = None
    refusal: None = None
    reasoning_content: str | None = None
    """What it thought; for chat templates that write it."""
    reasoning: str | None = None
    """vLLM's newer name of it."""
    provider_specific_fields: dict[str, Any] | None = None
    """litellm's notes to itself, which it sends back."""
    tool_calls: Annotated[list[MadeToolCall], Field(fail_fast=True)] | None = None


class ToolMessage(Hinted):
    """What a tool answered."""

    role: Literal["tool"]
    content: Content
    tool_call_id: str
    name: str | None = None


Message = Annotated[
    SystemMessage | DeveloperMessage | UserMessage | AssistantMessage | ToolMessage,
    Field(discriminator="role"),
]
Messages = Annotated[list[Message], Field(min_length=1, fail_fast=True)]


class FunctionDefinition(Body):
    """A function the model may call."""

    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.\-]{1,64}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    """A JSON schema of the arguments."""
    strict: bool | None = None
    """Hold the arguments to the schema, whenever the model decides to call."""


class Tool(Hinted):
    """Something the model may call."""

    type: Literal["function"]
    function: FunctionDefinition


class ChosenFunction(Body):
    """A function by its name."""

    name: str


class ToolChoice(Body):
    """The function that must be called."""

    type: Literal["function"]
    function: ChosenFunction


class AllowedToolsField(Body):
    """Some of the tools, and whether one of them must be called."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[ToolChoice], Field(min_length=1, max_length=128)]


class AllowedTools(Body):
    """Let only some of the tools be called."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedToolsField
