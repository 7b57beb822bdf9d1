"""What a request says about the shape of its answer, as the engine's `StructuredOutputs`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from ostinato.text.errors import GrammarError
from ostinato.text.structured import StructuredOutputs

from .errors import ApiError
from .requests import (
    ChatRequest,
    GrammarFormat,
    JsonObjectFormat,
    JsonSchemaFormat,
    RegexFormat,
    ResponseFormat,
    Tool,
    ToolChoice,
)
from .served_model import check_unicode

MAX_SCHEMA_CHARACTERS = 65536
MAX_SCHEMA_DEPTH = 48
"""A schema is compiled by recursion in the engine's process."""


def response_format(asked: ResponseFormat | None) -> StructuredOutputs | None:
    """The shape that `response_format` asks for; None for free text."""
    try:
        match asked:
            case JsonObjectFormat():
                return StructuredOutputs(json_object=True)
            case JsonSchemaFormat():
                return _of_schema(asked.json_schema.schema_, "response_format")
            case RegexFormat():
                check_unicode(asked.regex, "response_format")
                return StructuredOutputs(regex=asked.regex)
            case GrammarFormat():
                check_unicode(asked.grammar, "response_format")
                return StructuredOutputs(grammar=asked.grammar)
    except GrammarError as error:
        raise ApiError(400, str(error), param="response_format") from error
    return None


def forced_call(body: ChatRequest) -> StructuredOutputs | None:
    """The shape of an answer that must be a tool call; None where the model is free to choose.

    With one function chosen the answer is its arguments; with `required` it is name and parameters.
    """
    if isinstance(body.tool_choice, ToolChoice):
        return _of_schema(_parameters(chosen_tool(body.tools or (), body.tool_choice)), "tools")
    if body.tool_choice != "required":
        return None
    calls = [
        {
            "type": "object",
            "properties": {"name": {"const": tool.function.name}, "parameters": _parameters(tool)},
            "required": ["name", "parameters"],
            "additionalProperties": False,
        }
        for tool in body.tools or ()
    ]
    return _of_schema({"anyOf": calls}, "tools")


def chosen_tool(tools: Sequence[Tool], choice: ToolChoice) -> Tool:
    """The tool that a request names; 400 if it brings none of that name."""
    for tool in tools:
        if tool.function.name == choice.function.name:
            return tool
    raise ApiError(400, f"tool_choice: there is no tool {choice.function.name!r}", param="tool_choice")


def _parameters(tool: Tool) -> dict[str, Any]:
    return tool.function.parameters or {"type": "object"}


def _of_schema(schema: dict[str, Any], param: str) -> StructuredOutputs:
    if _depth(schema) > MAX_SCHEMA_DEPTH:
        message = f"{param}: a JSON schema may be nested {MAX_SCHEMA_DEPTH} levels deep"
        raise ApiError(400, message, param=param)
    try:
        text = json.dumps(schema)
    except ValueError as error:
        raise ApiError(400, f"{param}: {error}", param=param) from error
    if len(text) > MAX_SCHEMA_CHARACTERS:
        message = f"{param}: a JSON schema may have {MAX_SCHEMA_CHARACTERS} characters"
        raise ApiError(400, message, param=param)
    return StructuredOutputs(json=text)


def _depth(value: Any) -> int:
    """Levels of nesting, without recursion: what comes from outside may be deep."""
    deepest, level = 0, [value]
    while level and deepest <= MAX_SCHEMA_DEPTH:
        deepest += 1
        level = [
            inner
            for each in level
            for inner in (each.values() if isinstance(each, dict) else each if isinstance(each, list) else ())
        ]
    return deepest
