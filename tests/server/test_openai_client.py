"""The official client against a real server process."""

from __future__ import annotations

import json
from typing import Literal

import pydantic
import pytest

from .imported_late import openai
from .scripted_model import counted
from .server_process import ServerProcess

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
HELLO = [{"role": "user", "content": "Say hello"}]


@pytest.fixture(scope="module")
def client(server: ServerProcess) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def complete(client: openai.OpenAI, prompt: object = "a", **options: object):  # type: ignore[no-untyped-def]
    fields = {"model": "scripted", "temperature": 0, "max_tokens": 5, **options}
    return client.completions.create(prompt=prompt, **fields)


def chat(client: openai.OpenAI, messages: object = HELLO, **options: object):  # type: ignore[no-untyped-def]
    return client.chat.completions.create(
        messages=messages, **{"model": "scripted", "temperature": 0, **options}
    )


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["scripted"]
    assert client.models.retrieve("scripted").object == "model"


def test_completion(client: openai.OpenAI) -> None:
    answer = complete(client, "xyza")
    [choice] = answer.choices
    assert (choice.text, choice.finish_reason) == ("bcdef", "length")
    assert answer.id.startswith("cmpl-")
    usage = answer.usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (4, 5, 9)


def test_completion_has_16_tokens_unless_said_otherwise(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="scripted", prompt="a", temperature=0)
    assert answer.choices[0].text == counted("a", 16)


def test_completion_of_several_prompts_and_of_token_ids(client: openai.OpenAI) -> None:
    answer = complete(client, ["a", "A", "0"], max_tokens=3)
    assert [(choice.index, choice.text) for choice in answer.choices] == [(0, "bcd"), (1, "BCD"), (2, "123")]
    assert complete(client, [ord("a"), ord("k")], max_tokens=3).choices[0].text == "lmn"
    answer = complete(client, [[ord("a")], [ord("k")]], max_tokens=3)
    assert [choice.text for choice in answer.choices] == ["bcd", "lmn"]
    assert answer.usage.prompt_tokens == 2


def test_completion_stream(client: openai.OpenAI) -> None:
    chunks = list(complete(client, ["a", "K"], max_tokens=20, stream=True))
    for index, start in enumerate("aK"):
        own = [chunk.choices[0] for chunk in chunks if chunk.choices[0].index == index]
        assert "".join(choice.text for choice in own) == counted(start, 20)
        assert [choice.finish_reason for choice in own if choice.finish_reason] == ["length"]
        assert len(own) > 5
    assert len({chunk.id for chunk in chunks}) == 1
    assert all(chunk.usage is None for chunk in chunks)


def test_stream_with_usage(client: openai.OpenAI) -> None:
    chunks = list(complete(client, stream=True, stream_options={"include_usage": True}))
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == 5


def test_echo(client: openai.OpenAI) -> None:
    assert complete(client, "hija", echo=True).choices[0].text == "hijabcdef"
    answer = complete(client, "abz", echo=True, max_tokens=0, logprobs=1)
    assert answer.choices[0].text == "abz"
    assert answer.usage.completion_tokens == 0
    logprobs = answer.choices[0].logprobs
    assert logprobs.tokens == ["a", "b", "z"]
    assert logprobs.token_logprobs[0] is None
    assert logprobs.token_logprobs[1] > -1 > -5 > logprobs.token_logprobs[2]
    assert logprobs.text_offset == [0, 1, 2]


def test_completion_logprobs(client: openai.OpenAI) -> None:
    logprobs = complete(client, logprobs=3).choices[0].logprobs
    assert logprobs.tokens == list("bcdef")
    assert all(-1 < value < 0 for value in logprobs.token_logprobs)
    assert [max(top, key=top.get) for top in logprobs.top_logprobs] == list("bcdef")
    streamed = [chunk.choices[0].logprobs for chunk in complete(client, logprobs=3, stream=True)]
    assert [token for part in streamed for token in part.tokens] == list("bcdef")
    assert [offset for part in streamed for offset in part.text_offset] == [0, 1, 2, 3, 4]


def test_offsets_are_places_in_the_text(client: openai.OpenAI) -> None:
    """Where a character comes in several tokens, and where special ones are not shown."""
    choice = complete(client, "é<|assistant|>", logprobs=0, echo=True, max_tokens=20).choices[0]
    assert choice.text == "é<|assistant|>Hello wérld"
    begins = [choice.text.index(part) for part in ("é", "é", "<", "Hello", " w", "é", "é", "rld")]
    begins[5:7] = [choice.text.rindex("é")] * 2
    assert choice.logprobs.text_offset == [*begins, len(choice.text)]
    alone = complete(client, "<|assistant|>", logprobs=0, max_tokens=20).choices[0]
    assert alone.logprobs.text_offset == [0, 5, 7, 7, 8, 11]


def test_of_a_prompt_that_was_cut_what_is_left_is_echoed(client: openai.OpenAI) -> None:
    for kept, shown in ((2, "ij"), (4, "hhij"), (9, "hhij")):
        cut = {"truncate_prompt_tokens": kept}
        choice = complete(client, "hhij", echo=True, logprobs=0, max_tokens=2, extra_body=cut).choices[0]
        assert choice.text == shown + "kl"
        assert choice.logprobs.text_offset == list(range(len(choice.text)))


def test_n_and_seed(client: openai.OpenAI) -> None:
    options = {"temperature": 2, "max_tokens": 30, "n": 3, "seed": 7}
    first, again = (complete(client, **options) for _ in range(2))
    texts = [choice.text for choice in first.choices]
    assert [choice.index for choice in first.choices] == [0, 1, 2]
    assert len(set(texts)) == 3
    assert texts == [choice.text for choice in again.choices]
    assert texts[0] == complete(client, **{**options, "n": 1}).choices[0].text
    assert texts != [choice.text for choice in complete(client, **{**options, "seed": 8}).choices]
    assert first.usage.completion_tokens == 90
    assert first.usage.prompt_tokens == 1


def test_without_a_seed_draws_differ(client: openai.OpenAI) -> None:
    texts = {complete(client, temperature=2, max_tokens=30).choices[0].text for _ in range(4)}
    assert len(texts) > 1


def test_stop(client: openai.OpenAI) -> None:
    choice = complete(client, max_tokens=50, stop="ij").choices[0]
    assert (choice.text, choice.finish_reason) == ("bcdefgh", "stop")
    choice = complete(client, max_tokens=50, stop=["zz", "hi", "f"]).choices[0]
    assert choice.text == "bcde"
    chunks = list(complete(client, max_tokens=50, stop=["gh", "gx"], stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == "bcdef"
    assert chunks[-1].choices[0].finish_reason == "stop"
    kept = complete(client, max_tokens=50, stop="ij", extra_body={"include_stop_str_in_output": True})
    assert kept.choices[0].text == "bcdefghij"
    by_token = complete(client, max_tokens=50, extra_body={"stop_token_ids": [ord("f")]}).choices[0]
    assert (by_token.text, by_token.finish_reason) == ("bcde", "stop")


def test_stop_ends_only_its_own_choice(client: openai.OpenAI) -> None:
    answer = complete(client, ["a", "q"], max_tokens=10, stop="f")
    assert [(c.text, c.finish_reason) for c in answer.choices] == [
        ("bcde", "stop"),
        ("rstuvwxyz{", "length"),
    ]


def test_logit_bias_and_penalties(client: openai.OpenAI) -> None:
    assert complete(client, logit_bias={str(ord("Q")): 100}).choices[0].text == "QQQQQ"
    looping = complete(client, logit_bias={str(ord("Q")): 5, str(ord("Z")): 5}, max_tokens=8)
    assert looping.choices[0].text == "bcdefghi"
    repeated = {"logit_bias": {str(ord("Q")): 20}, "max_tokens": 12}
    assert complete(client, **repeated).choices[0].text == "Q" * 12
    assert complete(client, **repeated, frequency_penalty=2).choices[0].text != "Q" * 12
    assert complete(client, **repeated, presence_penalty=2).choices[0].text == "Q" * 12


def test_extensions(client: openai.OpenAI) -> None:
    greedy = complete(client, temperature=2, max_tokens=30, extra_body={"top_k": 1})
    assert greedy.choices[0].text == counted("a", 30)
    answer = chat(client, extra_body={"ignore_eos": True}, max_tokens=9)
    assert answer.choices[0].finish_reason == "length"
    ids = complete(client, extra_body={"return_token_ids": True}).choices[0].token_ids
    assert bytes(ids) == b"bcdef"


def test_chat(client: openai.OpenAI) -> None:
    answer = chat(client)
    [choice] = answer.choices
    assert (choice.message.role, choice.message.content) == ("assistant", "Hello wérld")
    assert choice.finish_reason == "stop"
    assert choice.message.tool_calls is None
    assert answer.object == "chat.completion"


def test_parts_of_a_message_are_lines_as_with_vllm(client: openai.OpenAI) -> None:
    parts = [{"type": "text", "text": "Say"}, {"type": "text", "text": "hello"}]
    asked = {"max_tokens": 1, "extra_body": {"return_token_ids": True}}
    one, other = (
        chat(client, [{"role": "user", "content": content}], **asked) for content in ("Say\nhello", parts)
    )
    assert one.prompt_token_ids == other.prompt_token_ids


def test_chat_stream_never_halves_a_character(client: openai.OpenAI) -> None:
    most = 0
    for _ in range(5):  # what a busy client has not fetched yet comes in one piece
        chunks = [chunk.choices[0] for chunk in chat(client, stream=True)]
        assert chunks[0].delta.role == "assistant"
        pieces = [choice.delta.content for choice in chunks if choice.delta.content]
        assert "".join(pieces) == "Hello wérld"
        assert chunks[-1].finish_reason == "stop"
        most = max(most, len(pieces))
    assert most >= 3


def test_max_completion_tokens(client: openai.OpenAI) -> None:
    for name in ("max_completion_tokens", "max_tokens"):
        choice = chat(client, **{name: 2}).choices[0]
        assert (choice.message.content, choice.finish_reason) == ("Hello w", "length")


def test_chat_logprobs(client: openai.OpenAI) -> None:
    content = chat(client, logprobs=True, top_logprobs=2).choices[0].logprobs.content
    assert content[0].token == "Hello"
    assert bytes(b for entry in content[:-1] for b in entry.bytes).decode() == "Hello wérld"
    assert all(len(entry.top_logprobs) == 2 for entry in content)
    assert content[0].top_logprobs[0].token == "Hello"
    plain = chat(client, logprobs=True).choices[0].logprobs.content
    assert all(entry.top_logprobs == [] for entry in plain)
    streamed = [chunk.choices[0].logprobs for chunk in chat(client, logprobs=True, stream=True)]
    assert [e.token for part in streamed if part for e in part.content] == [e.token for e in content]


def test_chat_n(client: openai.OpenAI) -> None:
    answer = chat(client, n=2)
    assert [choice.message.content for choice in answer.choices] == ["Hello wérld"] * 2
    chunks = list(chat(client, n=2, stream=True))
    for index in range(2):
        own = [chunk.choices[0] for chunk in chunks if chunk.choices[0].index == index]
        assert "".join(choice.delta.content or "" for choice in own) == "Hello wérld"


def test_tool_call(client: openai.OpenAI) -> None:
    choice = chat(client, tools=[WEATHER]).choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "Let me look."
    [call] = choice.message.tool_calls
    assert call.id.startswith("call_")
    assert call.function.name == "get_weather"
    assert json.loads(call.function.arguments) == {"city": "Paris"}


def streamed_call(client: openai.OpenAI) -> int:
    """Stream a tool call, check what it says, and count the pieces it came in."""
    content, name, arguments, ids, reasons, pieces = "", "", "", [], [], 0
    for chunk in chat(client, tools=[WEATHER], stream=True):
        choice = chunk.choices[0]
        content += choice.delta.content or ""
        for call in choice.delta.tool_calls or ():
            assert call.index == 0
            ids += [call.id] if call.id else []
            name += call.function.name or ""
            arguments += call.function.arguments or ""
            pieces += 1
        reasons += [choice.finish_reason] if choice.finish_reason else []
    assert (content, name, json.loads(arguments)) == ("Let me look.", "get_weather", {"city": "Paris"})
    assert len(ids) == 1
    assert reasons == ["tool_calls"]
    return pieces


def test_tool_call_streams(client: openai.OpenAI) -> None:
    # Where the server is kept waiting, tokens that came meanwhile go out together.
    assert any(streamed_call(client) >= 3 for _ in range(5)), "the arguments come as they are written"


class get_weather(pydantic.BaseModel):
    """The weather in a city."""

    city: str


class Pet(pydantic.BaseModel):
    kind: Literal["cat"]
    tame: bool


def test_strict_tools_are_parsed_by_the_client(client: openai.OpenAI) -> None:
    tools = [openai.pydantic_function_tool(get_weather)]
    assert tools[0]["function"]["strict"] is True
    options = {"model": "scripted", "messages": HELLO, "temperature": 0, "tools": tools}
    [call] = client.chat.completions.parse(**options).choices[0].message.tool_calls
    assert call.function.parsed_arguments == get_weather(city="Paris")
    with client.chat.completions.stream(**options) as stream:
        kinds = {event.type for event in stream}
        [call] = stream.get_final_completion().choices[0].message.tool_calls
    assert call.function.parsed_arguments == get_weather(city="Paris")
    assert {"content.delta", "tool_calls.function.arguments.delta"} <= kinds


def test_an_answer_is_parsed_by_the_client(client: openai.OpenAI) -> None:
    no_space = {str(ord(space)): -100 for space in " \t\r\n"}
    options = {"temperature": 0, "max_tokens": 60, "logit_bias": no_space}
    answer = client.chat.completions.parse(
        model="scripted", messages=HELLO, response_format=Pet, **options
    ).choices[0]
    assert answer.message.parsed.kind == "cat"


def test_tool_results_go_back_into_the_conversation(client: openai.OpenAI) -> None:
    call = {
        "id": "call_1",
        "type": "function",
        "function": {"name": "get_weather", "arguments": '{"city": "X"}'},
    }
    messages = [
        *HELLO,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "sunny"},
    ]
    assert chat(client, messages).choices[0].message.content == "Hello wérld"
    without = chat(client, messages, tools=[WEATHER], tool_choice="none").choices[0]
    assert without.message.content == "Hello wérld"


def test_embeddings(client: openai.OpenAI) -> None:
    answer = client.embeddings.create(model="scripted", input=["ba", "b"])
    assert [item.index for item in answer.data] == [0, 1]
    vectors = [item.embedding for item in answer.data]
    assert [vector.index(1.0) for vector in vectors] == [ord("a"), ord("b")]
    assert answer.usage.prompt_tokens == 3
    floats = client.embeddings.create(model="scripted", input="ba", encoding_format="float")
    assert floats.data[0].embedding == vectors[0]
    mean = client.embeddings.create(model="scripted", input="ba", extra_body={"pooling": "mean"})
    assert mean.data[0].embedding[ord("b")] == pytest.approx(0.5**0.5, abs=1e-6)
    # Nothing comes behind a text that is read, so that it may fill the whole context.
    full = client.embeddings.create(model="scripted", input="a" * 255 + "b")
    assert full.data[0].embedding == vectors[1]
    whole = {"extra_body": {"truncate_prompt_tokens": -1}}
    for longer in ("a" * 9_999 + "b", [97] * 299 + [98]):
        cut = client.embeddings.create(model="scripted", input=longer, **whole)
        assert (cut.data[0].embedding, cut.usage.prompt_tokens) == (vectors[1], 256)
    with pytest.raises(openai.BadRequestError, match="at most 256 are accepted"):
        client.embeddings.create(model="scripted", input="a" * 257)
    by_ids = client.embeddings.create(model="scripted", input=[[98, 97], [98]])
    assert [item.embedding for item in by_ids.data] == vectors


def test_cached_tokens_are_in_the_usage(client: openai.OpenAI) -> None:
    prompt = "one long beginning that nobody else has, " * 2
    first, second = (complete(client, prompt + end, max_tokens=2) for end in "AB")
    assert first.usage.prompt_tokens_details.cached_tokens == 0
    cached = second.usage.prompt_tokens_details.cached_tokens
    assert 0 < cached <= len(prompt)
    assert cached % 16 == 0


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"temperature": -1}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"n": 0}, "n"),
        ({"max_tokens": 100_000}, "max_tokens"),
        ({"prompt": "x" * 300}, "prompt"),
        ({"prompt": [5000]}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": "\ud800"}, "prompt"),
        ({"logit_bias": {"99999": 1}}, "logit_bias"),
        ({"logit_bias": {"a": 1}}, "logit_bias"),
        ({"logprobs": 21}, "logprobs"),
        ({"min_tokens": 9}, "min_tokens"),
        ({"stop": ""}, "stop"),
        ({"suffix": "x"}, "suffix"),
        ({"best_of": 3}, "best_of"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"temperature": "warm"}, "temperature"),
    ],
)
def test_a_wrong_completion_names_its_field(server: ServerProcess, options: dict, param: str) -> None:
    body = json.dumps({"prompt": "a", "max_tokens": 5, **options})
    answer = server.post("/v1/completions", content=body, headers={"Content-Type": "application/json"})
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert error["param"] == param
    assert error["message"]


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"response_format": {"type": "poem"}}, "response_format"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}, "response_format"),
        ({"response_format": {"type": "regex", "regex": "(a"}}, "response_format"),
        ({"tool_choice": {"type": "function", "function": {"name": "x"}}, "tools": [WEATHER]}, "tool_choice"),
        ({"tool_choice": "auto"}, "tool_choice"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"tools": [WEATHER, WEATHER]}, "tools"),
        ({"max_tokens": 3, "max_completion_tokens": 4}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "nobody", "content": "x"}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, "messages"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
    ],
)
def test_a_wrong_chat_names_its_field(server: ServerProcess, options: dict, param: str) -> None:
    answer = server.post("/v1/chat/completions", {"messages": HELLO, **options})
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"].split(".")[0] == param


def test_errors_are_those_of_the_client(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        complete(client, temperature=9)
    assert refused.value.param == "temperature"
    with pytest.raises(openai.NotFoundError) as missing:
        complete(client, model="another")
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError, match="nothing is asked for"):
        complete(client, max_tokens=0)
    with pytest.raises(openai.BadRequestError, match="context length"):
        complete(client, "x" * 200, max_tokens=200, stream=True)
