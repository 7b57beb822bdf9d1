"""Answers held to a schema, an expression or a tool, through the official client."""

from __future__ import annotations

import json
import re
from concurrent.futures import ThreadPoolExecutor

import jsonschema
import pytest

from .imported_late import openai
from .server_process import ServerProcess

SCHEMA = {
    "type": "object",
    "properties": {
        "kind": {"enum": ["cat", "dog"]},
        "age": {"type": "integer", "minimum": 0, "maximum": 20},
        "tame": {"type": "boolean"},
        "names": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 2},
    },
    "required": ["kind", "age", "tame", "names"],
    "additionalProperties": False,
}
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Paris", "Rome"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
NO_SPACE = {str(ord(space)): -100 for space in " \t\r\n"}
"""JSON allows any amount of it, and this model never has enough."""
CLOCK = {"type": "function", "function": {"name": "get_time"}}


@pytest.fixture(scope="module")
def client(server: ServerProcess) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def chat(client: openai.OpenAI, content: str = "Say it", **options: object):  # type: ignore[no-untyped-def]
    messages = [{"role": "user", "content": content}]
    fields = {"model": "scripted", "temperature": 2, "max_tokens": 120, "logit_bias": NO_SPACE, **options}
    return client.chat.completions.create(messages=messages, **fields)


def test_fifty_prompts_keep_to_a_schema(client: openai.OpenAI) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "pet", "schema": SCHEMA, "strict": True}}

    def answer_to(number: int) -> str:
        [choice] = chat(client, f"Pet number {number}", response_format=form, seed=number).choices
        assert choice.finish_reason == "stop", choice
        jsonschema.validate(json.loads(choice.message.content), SCHEMA)
        found: str = choice.message.content
        return found

    with ThreadPoolExecutor(16) as pool:
        texts = list(pool.map(answer_to, range(50)))
    assert len(texts) == 50
    assert len(set(texts)) > 10, "random answers differ"


def test_a_schema_streams(client: openai.OpenAI) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "pet", "schema": SCHEMA}}
    chunks = list(chat(client, response_format=form, stream=True, temperature=0))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    jsonschema.validate(json.loads(text), SCHEMA)
    assert len(chunks) > 5


def test_json_object(client: openai.OpenAI) -> None:
    form = {"type": "json_object"}
    answer = chat(client, response_format=form, logit_bias={str(ord(brace)): 100 for brace in "{}"})
    assert json.loads(answer.choices[0].message.content) == {}


def test_structural_tags(client: openai.OpenAI) -> None:
    """As vLLM's and SGLang's clients send them, in both forms."""
    text = {"type": "structural_tag", "format": {"type": "const_string", "value": "hié"}}
    assert chat(client, response_format=text).choices[0].message.content == "hié"
    part = {"begin": "Hello", "schema": {"enum": ["x"]}, "end": "!"}
    older = {"type": "structural_tag", "structures": [part], "triggers": ["Hello"]}
    for options in (
        {"response_format": older},
        {"extra_body": {"structured_outputs": {"structural_tag": json.dumps(older)}}},
    ):
        answer = chat(client, temperature=0, max_tokens=10, **options).choices[0].message.content
        assert answer.startswith('Hello"x"!'), "the model wants to say Hello, and then something else"
    for wrong, said in (
        ({"type": "structural_tag"}, "has format, or"),
        ({**older, **text}, "has format, or"),
        ({**text, "format": {"type": "const_string", "value": "x", "valu": "y"}}, "has no 'valu'"),
        ({**text, "format": {"type": "json_schema", "json_schema": {"not": {}}}}, "not cannot be enforced"),
    ):
        with pytest.raises(openai.BadRequestError, match=said) as refused:
            chat(client, response_format=wrong)
        assert refused.value.param == "response_format"


def test_regex_and_grammar(client: openai.OpenAI) -> None:
    form = {"type": "regex", "regex": "[0-9]{3}-(on|off)"}
    assert re.fullmatch("[0-9]{3}-(on|off)", chat(client, response_format=form).choices[0].message.content)
    body = {"response_format": {"type": "grammar", "grammar": 'root ::= "<" [a-c] ">"'}}
    answer = client.completions.create(model="scripted", prompt="x", max_tokens=9, extra_body=body)
    assert re.fullmatch("<[a-c]>", answer.choices[0].text)


def test_a_function_that_must_be_called(client: openai.OpenAI) -> None:
    chosen = {"type": "function", "function": {"name": "get_weather"}}
    choice = chat(client, tools=[CLOCK, WEATHER], tool_choice=chosen).choices[0]
    [call] = choice.message.tool_calls
    assert call.function.name == "get_weather"
    assert json.loads(call.function.arguments)["city"] in ("Paris", "Rome")
    assert choice.finish_reason == "tool_calls"


def test_any_function_must_be_called(client: openai.OpenAI) -> None:
    choice = chat(client, tools=[WEATHER], tool_choice="required").choices[0]
    [call] = choice.message.tool_calls
    assert call.function.name == "get_weather"
    assert json.loads(call.function.arguments)["city"] in ("Paris", "Rome")
    assert choice.message.content is None


def test_what_cannot_be_followed_is_refused(client: openai.OpenAI, server: ServerProcess) -> None:
    deep: dict = {"type": "object"}
    for _ in range(60):
        deep = {"type": "object", "properties": {"x": deep}}
    bad_reference = {"$ref": "#/$defs/nowhere"}
    for schema in (deep, bad_reference, {"type": "nothing"}):
        form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
        with pytest.raises(openai.BadRequestError) as refused:
            chat(client, response_format=form)
        assert refused.value.param == "response_format"
    assert server.get("/health_generate").status_code == 200


def test_what_a_schema_says_is_held_to_or_refused(client: openai.OpenAI) -> None:
    """A tool that is not strict is held to as much of its schema as can be."""
    schema = {"type": "array", "items": {"enum": [1]}, "uniqueItems": True}
    schema = {"type": "object", "properties": {"a": schema}, "required": ["a"], "additionalProperties": False}
    form = {"type": "json_schema", "json_schema": {"name": "pet", "schema": schema}}
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    strict = {"type": "function", "function": {**tool["function"], "strict": True}}
    refused = {
        "response_format": {"response_format": form},
        "tools": {"tools": [strict], "tool_choice": "required"},
    }
    for param, asked in refused.items():
        with pytest.raises(openai.BadRequestError, match="uniqueItems cannot be enforced") as caught:
            chat(client, **asked)
        assert caught.value.param == param
    for choice in ("required", {"type": "function", "function": {"name": "f"}}):
        [call] = chat(client, tools=[tool], tool_choice=choice, temperature=0).choices[0].message.tool_calls
        assert '{"a":[' in call.function.arguments.replace(" ", "")


def test_free_requests_run_beside(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="scripted", prompt="a", max_tokens=5, temperature=0)
    assert answer.choices[0].text == "bcdef"
