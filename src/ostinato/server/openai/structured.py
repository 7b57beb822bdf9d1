"""What a request says about the shape of its answer, as the engine's `StructuredOutputs`."""

from __future__ import annotations

import json
from typing import Any

from pydantic import ValidationError

from ostinato.text.errors import GrammarError
from ostinato.text.structured import StructuredOutputs, choice_grammar

from .conversation import Tool
from .errors import ApiError, without_places
from .requests import Sampling
from .served_model import check_unicode
from .shapes import (
    GrammarFormat,
    JsonObjectFormat,
    JsonSchema,
    JsonSchemaFormat,
    RegexFormat,
    ResponseFormat,
    Schema,
    StructuralTagFormat,
    StructuredOutputsField,
    TextFormat,
)
from .tool_calls.formats import layout_of
from .tool_use import ToolUse

MAX_SCHEMA_CHARACTERS = 65536
MAX_SCHEMA_DEPTH = 48
"""A schema is compiled by recursion in the engine's process."""

_ANY_OBJECT = {"type": "object"}
Shaped = tuple[str, StructuredOutputs | None]
"""The field that asks for the shape, and the shape; None for free text."""


def answer_shape(body: Sampling, use: ToolUse, tool_call_kind: str) -> Shaped:
    """The shape of an answer: what its format says, what its tools say, or either of the two.

    With one function chosen the answer is its arguments; where a call is required, it is one call in Llama's
    layout, whatever the model's is; else calls are in the model's layout, beside text or instead of it.
    """
    param, asked = _asked_format(body)
    if use.chosen is not None:
        function = use.chosen.function
        schema = _checked(function.parameters or _ANY_OBJECT, "tools")
        return "tools", StructuredOutputs(json=schema, strict=bool(function.strict))
    if use.is_required:
        return "tools", _structural({"type": "or", "elements": _tags(use, "llama")})
    if not use.tools or tool_call_kind == "none":
        return param, None if asked is None else _outputs(asked, param)
    calls = _tags(use, tool_call_kind)
    if asked is not None:
        repeated = {
            "type": "tags_with_separator",
            "tags": calls,
            "separator": layout_of(tool_call_kind).between,
        }
        choice = {**repeated, "at_least_one": True, "stop_after_first": use.only_one}
        return param, _structural({"type": "or", "elements": [_as_part(asked, param), choice]})
    if not use.only_one and not any(tool.function.strict for tool in use.tools):
        return param, None
    trigger = layout_of(tool_call_kind).trigger
    free = {"type": "triggered_tags", "triggers": [trigger], "tags": calls, "stop_after_first": use.only_one}
    return "tools", _structural(free)


# -- of a format -----------------------------------------------------------------------------------


def _asked_format(body: Sampling) -> tuple[str, ResponseFormat | None]:
    """The field that asks for a format, and the format, under whichever of its names it comes."""
    found = dict(_named_formats(body))
    if len(found) > 1:
        names = " and ".join(found)
        raise ApiError(
            400, f"{names}: give one of them, an answer has one shape", param=next(reversed(found))
        )
    return next(iter(found.items()), ("response_format", None))


def _named_formats(body: Sampling) -> list[tuple[str, ResponseFormat]]:
    asked: list[tuple[str, ResponseFormat]] = []
    if body.response_format is not None and not isinstance(body.response_format, TextFormat):
        asked.append(("response_format", body.response_format))
    if body.structured_outputs is not None:
        asked.append(("structured_outputs", _of_structured_outputs(body.structured_outputs)))
    if body.guided_json is not None:
        asked.append(("guided_json", _json_format(body.guided_json, "guided_json")))
    if body.guided_choice is not None:
        asked.append(("guided_choice", _choice_format(body.guided_choice)))
    for name in ("guided_regex", "regex"):
        if (regex := getattr(body, name)) is not None:
            asked.append((name, RegexFormat(type="regex", regex=regex)))
    for name in ("guided_grammar", "ebnf"):
        if (grammar := getattr(body, name)) is not None:
            asked.append((name, GrammarFormat(type="grammar", grammar=grammar)))
    return asked


def _of_structured_outputs(given: StructuredOutputsField) -> ResponseFormat:
    param = "structured_outputs"
    asked: list[ResponseFormat] = []
    if given.json_ is not None:
        asked.append(_json_format(given.json_, param))
    if given.json_object:
        asked.append(JsonObjectFormat(type="json_object"))
    if given.regex is not None:
        asked.append(RegexFormat(type="regex", regex=given.regex))
    if given.choice is not None:
        asked.append(_choice_format(given.choice))
    if given.grammar is not None:
        asked.append(GrammarFormat(type="grammar", grammar=given.grammar))
    if given.structural_tag is not None:
        asked.append(_tag_format(given.structural_tag, param))
    if len(asked) != 1:
        kinds = "json, json_object, regex, choice, grammar and structural_tag"
        message = f"{param}: give one of {kinds}, not {len(asked)}"
        raise ApiError(400, message, param=param)
    return asked[0]


def _json_format(schema: Schema, param: str) -> JsonSchemaFormat:
    if isinstance(schema, str):
        try:
            schema = json.loads(schema)
        except (ValueError, RecursionError):
            raise ApiError(400, f"{param}: the schema is not JSON", param=param) from None
        if not isinstance(schema, dict):
            raise ApiError(400, f"{param}: a JSON schema is an object", param=param)
    return JsonSchemaFormat(type="json_schema", json_schema=JsonSchema.model_validate({"schema": schema}))


def _tag_format(text: str, param: str) -> StructuralTagFormat:
    try:
        return StructuralTagFormat.model_validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        place = "".join(f"{each}: " for each in first["loc"])
        raise ApiError(
            400, f"{param}: the structural tag is none: {place}{first['msg']}", param=param
        ) from None


def _choice_format(choices: list[str]) -> GrammarFormat:
    # Constructed: the limit on a grammar's length is one on what clients write, and these have their own.
    return GrammarFormat.model_construct(type="grammar", grammar=choice_grammar(choices))


def _outputs(asked: ResponseFormat, param: str) -> StructuredOutputs:
    try:
        match asked:
            case JsonSchemaFormat():
                return _of_schema(asked.json_schema.schema_, param)
            case RegexFormat():
                check_unicode(asked.regex, param)
                return StructuredOutputs(regex=asked.regex)
            case GrammarFormat():
                check_unicode(asked.grammar, param)
                return StructuredOutputs(grammar=asked.grammar)
            case StructuralTagFormat():
                form = {"type": "structural_tag", "format": _tagged(asked, param)}
                return StructuredOutputs(structural_tag=_checked(form, param, "a structural tag"))
            case _:
                return StructuredOutputs(json_object=True)
    except GrammarError as error:
        raise ApiError(400, without_places(str(error)), param=param) from error


def _as_part(asked: ResponseFormat, param: str) -> dict[str, Any]:
    """A format as one of several in a structural tag."""
    match asked:
        case JsonSchemaFormat():
            return _schema_part(asked.json_schema.schema_, param)
        case RegexFormat():
            return {"type": "regex", "pattern": asked.regex}
        case GrammarFormat():
            return {"type": "grammar", "grammar": asked.grammar}
        case StructuralTagFormat():
            return _tagged(asked, param)
        case _:
            return {"type": "json_schema", "json_schema": {"type": "object"}}


def _tagged(asked: StructuralTagFormat, param: str) -> dict[str, Any]:
    """The older form as the newer one."""
    older = (asked.structures, asked.triggers)
    if asked.format is not None and older == (None, None):
        return asked.format
    if asked.format is not None or None in older:
        message = f"{param}: a structural tag has format, or structures and triggers"
        raise ApiError(400, message, param=param)
    tags = [
        {
            "type": "tag",
            "begin": each.begin,
            "content": {"type": "json_schema", "json_schema": each.schema_},
            "end": each.end,
        }
        for each in asked.structures or ()
    ]
    return {"type": "triggered_tags", "triggers": asked.triggers, "tags": tags}


# -- of tools --------------------------------------------------------------------------------------


def _tags(use: ToolUse, kind: str) -> list[dict[str, Any]]:
    """A call of each tool. Where the model need not call, only strict ones are held to their schemas."""
    layout = layout_of(kind)
    return [
        {
            "type": "tag",
            "begin": layout.begin(tool.function.name),
            "content": _arguments_part(tool, is_held=use.is_required),
            "end": layout.end,
        }
        for tool in use.tools
    ]


def _arguments_part(tool: Tool, *, is_held: bool) -> dict[str, Any]:
    """The arguments of a call. A schema that is not strict is loosened in the grammar's own process: its
    expressions are matched there."""
    function = tool.function
    if not (is_held or function.strict):
        return _schema_part(_ANY_OBJECT, "tools")
    part = _schema_part(function.parameters or _ANY_OBJECT, "tools")
    return part if function.strict else {**part, "strict": False}


# -- checked ---------------------------------------------------------------------------------------


def _schema_part(schema: dict[str, Any], param: str) -> dict[str, Any]:
    _checked(schema, param)
    return {"type": "json_schema", "json_schema": schema}


def _of_schema(schema: dict[str, Any], param: str) -> StructuredOutputs:
    return StructuredOutputs(json=_checked(schema, param))


def _structural(form: dict[str, Any]) -> StructuredOutputs:
    text = json.dumps({"type": "structural_tag", "format": form})
    if len(text) > 2 * MAX_SCHEMA_CHARACTERS:
        message = f"tools: their schemas may have {2 * MAX_SCHEMA_CHARACTERS} characters together"
        raise ApiError(400, message, param="tools")
    return StructuredOutputs(structural_tag=text)


def _checked(schema: dict[str, Any], param: str, what: str = "a JSON schema") -> str:
    """A schema as JSON."""
    if _depth(schema) > MAX_SCHEMA_DEPTH:
        message = f"{param}: {what} may be nested {MAX_SCHEMA_DEPTH} levels deep"
        raise ApiError(400, message, param=param)
    try:
        text = json.dumps(schema)
        json.dumps(schema, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        message = f"{param}: it is not valid Unicode: {error.reason}"
        raise ApiError(400, message, param=param) from error
    except ValueError as error:
        raise ApiError(400, f"{param}: {error}", param=param) from error
    if len(text) > MAX_SCHEMA_CHARACTERS:
        message = f"{param}: {what} may have {MAX_SCHEMA_CHARACTERS} characters"
        raise ApiError(400, message, param=param)
    return text


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
