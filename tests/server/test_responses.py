"""`/v1/responses` through the official client."""

from __future__ import annotations

import json
from typing import Any

import pydantic
import pytest

from .imported_late import openai
from .server_process import ServerProcess

WEATHER = {
    "type": "function",
    "name": "get_weather",
    "description": "The weather in a city.",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"],
        "additionalProperties": False,
    },
    "strict": True,
}
NO_SPACE = {"logit_bias": {str(ord(space)): -100 for space in " \t\r\n"}}


class Pet(pydantic.BaseModel):
    kind: str
    tame: bool


@pytest.fixture(scope="module")
def client(server: ServerProcess) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def respond(client: openai.OpenAI, given: object = "Say hello", **options: object) -> Any:
    return client.responses.create(input=given, **{"model": "scripted", "temperature": 0, **options})


def test_a_response(client: openai.OpenAI) -> None:
    response = respond(client, instructions="Be kind.", metadata={"a": "b"}, store=True)
    assert response.output_text == "Hello wérld"
    assert (response.status, response.object) == ("completed", "response")
    assert response.id.startswith("resp_") or response.id.startswith("resp-")
    [message] = response.output
    assert (message.type, message.role, message.status) == ("message", "assistant", "completed")
    usage = response.usage
    assert usage.output_tokens == 6
    assert usage.total_tokens == usage.input_tokens + 6
    assert response.metadata == {"a": "b"}
    assert response.instructions == "Be kind."
    assert response.error is None
    longer = respond(client, [{"role": "developer", "content": "Be kind."}, {"role": "user", "content": "x"}])
    assert longer.output_text == "Hello wérld"


def test_a_response_that_is_cut_short(client: openai.OpenAI) -> None:
    response = respond(client, max_output_tokens=2)
    assert response.output_text == "Hello w"
    assert response.status == "incomplete"
    assert response.incomplete_details.reason == "max_output_tokens"
    last = list(respond(client, max_output_tokens=2, stream=True))[-1]
    assert last.type == "response.incomplete"
    assert last.response.output[0].status == "incomplete"


def test_events_come_in_the_order_that_clients_expect(client: openai.OpenAI) -> None:
    events = list(respond(client, stream=True))
    kinds = [event.type.removeprefix("response.") for event in events]
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert [kind for kind in kinds if kind != "output_text.delta"] == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "completed",
    ]
    assert kinds.index("output_text.delta") == 4
    assert "".join(deltas) == "Hello wérld"
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert events[0].response.status == "in_progress"
    assert events[0].response.output == []
    assert events[-1].response.output_text == "Hello wérld"
    assert events[-1].response.usage.output_tokens == 6
    assert len({event.item_id for event in events if hasattr(event, "item_id")}) == 1


def test_the_clients_own_stream_helper(client: openai.OpenAI) -> None:
    with client.responses.stream(model="scripted", input="Say hello", temperature=0) as stream:
        for _ in stream:
            pass
        assert stream.get_final_response().output_text == "Hello wérld"


def test_a_function_is_called_and_its_output_goes_back(client: openai.OpenAI) -> None:
    response = respond(client, tools=[WEATHER], extra_body=NO_SPACE)
    message, call = response.output
    assert message.content[0].text == "Let me look."
    assert (call.type, call.name, json.loads(call.arguments)) == (
        "function_call",
        "get_weather",
        {"city": "Paris"},
    )
    assert call.call_id.startswith("call_")
    history = [
        {"role": "user", "content": [{"type": "input_text", "text": "The weather in Paris?"}]},
        *(item.model_dump() for item in response.output),
        {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"},
    ]
    again = respond(client, history, tools=[WEATHER], tool_choice="none")
    assert again.output_text == "Hello wérld"


def test_a_function_call_streams(client: openai.OpenAI) -> None:
    events = list(respond(client, tools=[WEATHER], stream=True, extra_body=NO_SPACE))
    kinds = [event.type.removeprefix("response.") for event in events]
    arguments = "".join(e.delta for e in events if e.type == "response.function_call_arguments.delta")
    assert json.loads(arguments) == {"city": "Paris"}
    distinct = [kind for kind, before in zip(kinds, ["", *kinds], strict=False) if kind != before]
    assert distinct == [
        *("created", "in_progress"),
        *("output_item.added", "content_part.added", "output_text.delta", "output_text.done"),
        *("content_part.done", "output_item.done"),
        *("output_item.added", "function_call_arguments.delta", "function_call_arguments.done"),
        *("output_item.done", "completed"),
    ]
    done = next(event for event in events if event.type == "response.function_call_arguments.done")
    assert (done.output_index, done.arguments) == (1, arguments)
    assert events[-1].response.output[1].name == "get_weather"


def test_tool_choice(client: openai.OpenAI) -> None:
    for choice in (
        "required",
        {"type": "function", "name": "get_weather"},
        {
            "type": "allowed_tools",
            "mode": "required",
            "tools": [{"type": "function", "name": "get_weather"}],
        },
    ):
        enum = {**WEATHER["parameters"], "properties": {"city": {"enum": ["Rome"]}}}  # type: ignore[dict-item]
        tool = {**WEATHER, "parameters": enum}
        [call] = respond(client, tools=[tool], tool_choice=choice, extra_body=NO_SPACE).output
        assert (call.name, json.loads(call.arguments)) == ("get_weather", {"city": "Rome"})


def test_an_answer_that_keeps_to_a_schema(client: openai.OpenAI) -> None:
    fields = {"kind": {"enum": ["cat"]}, "tame": {"type": "boolean"}}
    schema = {"type": "object", "properties": fields, "required": [*fields], "additionalProperties": False}
    form = {"type": "json_schema", "name": "pet", "schema": schema, "strict": True}
    response = respond(client, text={"format": form}, extra_body=NO_SPACE, max_output_tokens=80)
    assert Pet.model_validate_json(response.output_text).kind == "cat"
    assert response.text.format.name == "pet"


def test_parse(client: openai.OpenAI) -> None:
    """What the client makes of a model of pydantic is accepted, whatever this model writes."""
    parsed = client.responses.parse(
        model="scripted",
        input="a pet",
        text_format=Pet,
        temperature=0,
        max_output_tokens=40,
        extra_body={"logit_bias": {**NO_SPACE["logit_bias"], str(ord('"')): 100}},
    )
    assert parsed.status in ("completed", "incomplete")
    if parsed.status == "completed":
        assert isinstance(parsed.output_parsed, Pet)


def test_logprobs(client: openai.OpenAI) -> None:
    include = ["message.output_text.logprobs"]
    ids = {"return_tokens_as_token_ids": True, "logprob_token_ids": [97, 98]}
    [first, *_] = respond(client, include=include, extra_body=ids).output[0].content[0].logprobs
    assert first.token == "token_id:256"
    assert {each.token for each in first.top_logprobs} == {"token_id:97", "token_id:98", first.token}
    response = respond(client, include=include, top_logprobs=2)
    first = response.output[0].content[0].logprobs[0]
    assert first.token == "Hello"
    assert len(first.top_logprobs) == 2
    tokens = [entry.token for entry in response.output[0].content[0].logprobs]
    last = list(respond(client, include=["message.output_text.logprobs"], stream=True))[-1]
    streamed = last.response.output[0].content[0].logprobs
    assert [entry.token for entry in streamed] == tokens, "half a character too"


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": "c"}, "conversation"),
        ({"background": True}, "background"),
        ({"truncation": "auto"}, "truncation"),
        ({"prompt": {"id": "x"}}, "prompt"),
        ({"prompt_logprobs": 1}, "prompt_logprobs"),
        ({"best_of": 2}, "best_of"),
        ({"return_token_ids": True}, "return_token_ids"),
        ({"top_logprobs": 1, "include": []}, "top_logprobs"),
        ({"stream_options": {"continuous_usage_stats": True}, "stream": True}, "stream_options"),
        ({"response_format": {"type": "text"}, "text": {"format": {"type": "text"}}}, "text"),
        ({"tools": [{"type": "web_search"}]}, "tools"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input"),
        ({"input": "x" * 400}, "input"),
        ({"max_output_tokens": 4000}, "max_output_tokens"),
        ({"text": {"format": {"type": "json_schema", "name": "x", "schema": {"type": "no"}}}}, "text"),
        ({"tool_choice": {"type": "function", "name": "x"}, "tools": [WEATHER]}, "tool_choice"),
    ],
    ids=lambda value: ",".join(value) if isinstance(value, dict) else None,
)
def test_what_cannot_be_done_is_refused_by_name(server: ServerProcess, options: dict, param: str) -> None:
    answer = server.post("/v1/responses", {"model": "scripted", "input": "x", **options})
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"].split(".")[0] == param


def test_responses_are_not_stored(client: openai.OpenAI) -> None:
    id = respond(client, store=True).id
    for ask in (client.responses.retrieve, client.responses.delete, client.responses.cancel):
        with pytest.raises(openai.NotFoundError, match="not stored"):
            ask(id)
