"""Fields that clients of OpenAI, vLLM and SGLang send: they act, are harmless, or are refused by name."""

import json
import re
from typing import Any

import pytest

from ostinato.server.openai.conversation import AssistantMessage
from ostinato.server.openai.served_model import _as_template_message

from .server_process import ServerProcess

CHAT = {"model": "scripted", "messages": [{"role": "user", "content": "Say hello"}], "temperature": 0}
TEXT = {"model": "scripted", "prompt": "a", "temperature": 0, "max_tokens": 5}
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Rome", "Paris"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}


def chunks_of(server: ServerProcess, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    text = server.post(path, {**body, "stream": True}).text
    return [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]


HARMLESS = [
    {"store": True},
    {"store": False, "metadata": {"a": "b"}},
    {"service_tier": "auto"},
    {"user": "me", "safety_identifier": "x", "prompt_cache_key": "y"},
    {"prompt_cache_retention": "24h"},
    {"reasoning_effort": "low"},
    {"best_of": 1},
    {"logit_bias": {}, "stop": [], "stop_token_ids": []},
    {"functions": None, "function_call": None, "audio": None, "prediction": None},
    {"lora_path": None, "guided_json": None, "cache_salt": None, "extra_args": {}},
    {"use_beam_search": False, "length_penalty": 1.0, "spaces_between_special_tokens": True},
    {"spaces_between_special_tokens": False, "bad_words": [], "allowed_token_ids": None},
    {"bad_words": ["zz", "never"], "cache_salt": "mine"},
    {"priority": 0},
    {"stream_options": None},
    {"session_id": "mine", "function_call": "none", "truncation_side": "left"},
    {"include_reasoning": True, "separate_reasoning": False, "stream_reasoning": True},
    {"return_prompt_text": False, "return_token_offsets": False, "routed_experts_prompt_start": 0},
    {"add_special_tokens": False},
    {"structured_outputs": None, "data_parallel_rank": 0, "no_stop_trim": False},
]


@pytest.mark.parametrize("extras", HARMLESS, ids=lambda extras: ",".join(extras))
def test_harmless_fields_change_nothing(server: ServerProcess, extras: dict) -> None:
    answer = server.post("/v1/chat/completions", {**CHAT, **extras})
    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"][0]["message"]["content"] == "Hello wérld"
    answer = server.post("/v1/completions", {**TEXT, **extras})
    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"][0]["text"] == "bcdef"


@pytest.mark.parametrize(
    ("extras", "hint"),
    [
        ({"functions": [{"name": "f"}]}, "tools"),
        ({"function_call": "auto"}, "tool_choice"),
        ({"use_beam_search": True}, "beam"),
        ({"best_of": 4}, "best_of"),
        ({"priority": 3}, "first come"),
        ({"cache_salt": ""}, "cache_salt"),
        ({"chat_template": "{{ messages }}"}, "chat"),
        ({"lora_path": "x"}, "adapter"),
        ({"bad_words": [""]}, "bad_words"),
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"allowed_token_ids": [5, 99999]}, "99999 is not a token id"),
        ({"allowed_token_ids": [98], "bad_words": ["b"]}, "leave no token"),
        ({"prompt_logprobs": -1}, "--max-logprobs"),
        ({"prompt_logprobs": 21}, "at most 20"),
        ({"temprature": 0.5}, "temprature"),
        ({"guided_regex": "a", "guided_choice": ["b"]}, "one of"),
        ({"response_format": {"type": "json_object"}, "regex": "a"}, "one of"),
        ({"prompt_logprobs": 2, "stream": True}, "prompt_logprobs"),
        ({"request_id": "no blanks allowed"}, "request_id"),
        ({"separate_reasoning": True}, "between its tags"),
        ({"include_reasoning": False}, "between its tags"),
        ({"truncation_side": "right"}, "last tokens"),
        ({"data_parallel_rank": 1}, "data_parallel_rank"),
    ],
    ids=lambda value: ",".join(value) if isinstance(value, dict) else None,
)
def test_what_cannot_be_done_is_refused_by_name(server: ServerProcess, extras: dict, hint: str) -> None:
    for path, body in (("/v1/chat/completions", CHAT), ("/v1/completions", TEXT)):
        answer = server.post(path, {**body, **extras})
        assert answer.status_code == 400, answer.text
        error = answer.json()["error"]
        assert error["param"] in extras
        assert hint in error["message"], error["message"]


def test_shapes_under_the_names_of_the_peers(server: ServerProcess) -> None:
    schema = {"enum": ["yes", "no"]}
    for extras, pattern in (
        ({"guided_regex": "[0-9]{3}"}, "[0-9]{3}"),
        ({"regex": "[0-9]{3}"}, "[0-9]{3}"),
        ({"guided_choice": ["red", 'a "b"\n']}, '(red|a "b"\n)'),
        ({"structured_outputs": {"choice": ["red", "blue"], "disable_fallback": False}}, "(red|blue)"),
        ({"structured_outputs": {"regex": "[xy]z"}}, "[xy]z"),
        ({"guided_grammar": 'root ::= "<" [a-c] ">"'}, "<[a-c]>"),
        ({"ebnf": 'root ::= "<" [a-c] ">"'}, "<[a-c]>"),
        ({"guided_json": schema}, '"(yes|no)"'),
        ({"guided_json": json.dumps(schema)}, '"(yes|no)"'),
        ({"structured_outputs": {"json": schema}}, '"(yes|no)"'),
    ):
        answer = server.post("/v1/completions", {**TEXT, "temperature": 1, "max_tokens": 20, **extras})
        assert answer.status_code == 200, answer.text
        assert re.fullmatch(pattern, answer.json()["choices"][0]["text"]), (extras, answer.text)
    answer = server.post("/v1/chat/completions", {**CHAT, "guided_choice": ["red"]})
    assert answer.json()["choices"][0]["message"]["content"] == "red"
    broken = server.post("/v1/completions", {**TEXT, "structured_outputs": {"regex": "a", "choice": ["b"]}})
    assert broken.status_code == 400
    assert broken.json()["error"]["param"] == "structured_outputs"


def test_a_message_that_goes_on(server: ServerProcess) -> None:
    messages = [{"role": "user", "content": "count"}, {"role": "assistant", "content": "so: a"}]
    body = {**CHAT, "messages": messages, "max_tokens": 3, "continue_final_message": True}
    answer = server.post("/v1/chat/completions", {**body, "add_generation_prompt": False}).json()
    assert answer["choices"][0]["message"]["content"] == "bcd"
    assert server.post("/v1/chat/completions", body).json()["choices"][0]["message"]["content"] == "bcd"
    refused = server.post("/v1/chat/completions", {**body, "add_generation_prompt": True})
    assert refused.json()["error"]["param"] == "continue_final_message"


def test_prompts_are_cut_where_that_is_asked_for(server: ServerProcess) -> None:
    body = {**TEXT, "prompt": "x" * 300 + "a", "truncate_prompt_tokens": 4}
    answer = server.post("/v1/completions", body).json()
    assert answer["choices"][0]["text"] == "bcdef"
    assert answer["usage"]["prompt_tokens"] == 4
    all_of_it = server.post("/v1/completions", {**body, "truncate_prompt_tokens": -1}).json()
    assert all_of_it["usage"]["prompt_tokens"] == 251, "as many as leave room for the answer"
    chat = server.post("/v1/chat/completions", {**CHAT, "truncate_prompt_tokens": 1}).json()
    assert chat["usage"]["prompt_tokens"] == 1
    assert chat["choices"][0]["message"]["content"] == "Hello wérld"


def test_prompt_logprobs(server: ServerProcess) -> None:
    answer = server.post("/v1/completions", {**TEXT, "prompt": "abz", "prompt_logprobs": 1}).json()
    nothing, first, second = answer["choices"][0]["prompt_logprobs"]
    assert nothing is None
    assert first[str(ord("b"))]["decoded_token"] == "b"
    assert first[str(ord("b"))]["rank"] == 1
    assert second[str(ord("z"))]["logprob"] < second[str(ord("c"))]["logprob"]
    chat = server.post("/v1/chat/completions", {**CHAT, "prompt_logprobs": 0}).json()
    assert len(chat["prompt_logprobs"]) == chat["usage"]["prompt_tokens"]


def test_token_ids_of_answers_and_prompts(server: ServerProcess) -> None:
    text = server.post("/v1/completions", {**TEXT, "return_token_ids": True}).json()["choices"][0]
    assert text["token_ids"] == list(b"bcdef")
    assert text["prompt_token_ids"] == list(b"a")
    chat = server.post("/v1/chat/completions", {**CHAT, "return_token_ids": True}).json()
    ids = chat["choices"][0]["token_ids"]
    assert server.post("/detokenize", {"tokens": ids[:-1]}).json()["prompt"] == "Hello wérld"
    assert len(chat["prompt_token_ids"]) == chat["usage"]["prompt_tokens"]
    first, *others = chunks_of(server, "/v1/chat/completions", {**CHAT, "return_token_ids": True, "n": 2})
    assert first["prompt_token_ids"] == chat["prompt_token_ids"], "of the chunk, as vLLM has it"
    assert not any("prompt_token_ids" in chunk for chunk in others)
    choices = [choice for chunk in others for choice in chunk["choices"] if choice["index"] == 1]
    assert [token for choice in choices for token in choice.get("token_ids", [])] == ids


def test_ids_that_the_client_chooses(server: ServerProcess) -> None:
    assert server.post("/v1/completions", {**TEXT, "request_id": "my-1"}).json()["id"] == "cmpl-my-1"
    assert server.post("/v1/chat/completions", {**CHAT, "rid": "my-2"}).json()["id"] == "my-2"
    answer = server.post("/v1/chat/completions", CHAT, headers={"X-Request-Id": "my-3"})
    assert answer.json()["id"] == "chatcmpl-my-3"
    assert answer.headers["x-request-id"] == "chatcmpl-my-3"


def test_usage_in_every_chunk(server: ServerProcess) -> None:
    options = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    chunks = chunks_of(server, "/v1/completions", {**TEXT, **options})
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts)
    assert counts[-1] == 5


def test_messages_as_clients_send_them_back(server: ServerProcess) -> None:
    call = {"id": "call_1", "type": "function", "index": 0}
    call["function"] = {"name": "get_weather", "arguments": ""}
    messages = [
        *CHAT["messages"],
        {
            "role": "assistant",
            "content": None,
            "refusal": None,
            "annotations": [],
            "audio": None,
            "function_call": None,
            "reasoning_content": "hm",
            "reasoning": "hm",
            "provider_specific_fields": {"refusal": None},
            "tool_calls": [call],
        },
        {"role": "tool", "tool_call_id": "call_1", "name": "get_weather", "content": "sunny"},
    ]
    answer = server.post("/v1/chat/completions", {**CHAT, "messages": messages, "tool_choice": "none"})
    assert answer.status_code == 200, answer.text
    thought = AssistantMessage(role="assistant", content="a", reasoning="hm", cache_control={})
    assert _as_template_message(thought) == {"role": "assistant", "content": "a", "reasoning_content": "hm"}
    hint = {"cache_control": {"type": "ephemeral"}}
    parts = [{"type": "text", "text": "Say hello", **hint}]
    hinted = {"messages": [{"role": "user", "content": parts, **hint}], "tools": [{**WEATHER, **hint}]}
    answer = server.post("/v1/chat/completions", {**CHAT, **hinted, "tool_choice": "none"})
    assert answer.json()["choices"][0]["message"]["content"] == "Hello wérld", answer.text
    message = answer.json()["choices"][0]["message"]
    assert (message["reasoning"], message["reasoning_content"]) == (None, None), "vLLM's examples read them"
    sent_back = {"messages": [*CHAT["messages"], message, *CHAT["messages"]]}
    assert server.post("/v1/chat/completions", {**CHAT, **sent_back}).status_code == 200
    picture = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]
    answer = server.post("/v1/chat/completions", {**CHAT, "messages": picture})
    assert "image_url" in answer.json()["error"]["message"]


def chat_with_tools(server: ServerProcess, **extras: object) -> dict:
    no_space = {str(ord(space)): -100 for space in " \t\r\n"}
    answer = server.post(
        "/v1/chat/completions",
        {**CHAT, "tools": [WEATHER], "max_tokens": 100, "logit_bias": no_space, **extras},
    )
    assert answer.status_code == 200, answer.text
    choice: dict = answer.json()["choices"][0]
    return choice


def test_a_strict_tool_keeps_to_its_schema(server: ServerProcess) -> None:
    """The model wants to say Paris."""
    choice = chat_with_tools(server)
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] == "Let me look."
    assert json.loads(choice["message"]["tool_calls"][0]["function"]["arguments"]) == {"city": "Paris"}
    schema = {**WEATHER["function"]["parameters"], "properties": {"city": {"enum": ["Rome"]}}}
    for strict, city in ((True, "Rome"), (False, "Paris")):
        tool = {
            "type": "function",
            "function": {**WEATHER["function"], "parameters": schema, "strict": strict},
        }
        choice = chat_with_tools(server, tools=[tool])
        [call] = choice["message"]["tool_calls"]
        assert json.loads(call["function"]["arguments"]) == {"city": city}


def test_one_call_where_several_are_not_wanted(server: ServerProcess) -> None:
    choice = chat_with_tools(server, parallel_tool_calls=False, ignore_eos=True)
    assert choice["finish_reason"] == "tool_calls"
    assert len(choice["message"]["tool_calls"]) == 1
    assert server.post("/v1/chat/completions", {**CHAT, "parallel_tool_calls": False}).status_code == 200


def test_tools_beside_a_response_format(server: ServerProcess) -> None:
    """A call, or an answer of that format: the model chooses."""
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": ["yes"]}}}
    choice = chat_with_tools(server, response_format=form)
    message = choice["message"]
    if message.get("tool_calls"):
        assert json.loads(message["tool_calls"][0]["function"]["arguments"])["city"] in ("Rome", "Paris")
    else:
        assert message["content"] == '"yes"'
    quote = {str(ord('"')): 100}
    assert chat_with_tools(server, response_format=form, logit_bias=quote)["message"]["content"] == '"yes"'


def test_forms_of_tool_choice(server: ServerProcess) -> None:
    nested = {
        "type": "function",
        "function": {
            "name": "place",
            "parameters": {
                "$defs": {"Spot": {"enum": ["here", "there"]}},
                "type": "object",
                "properties": {"spot": {"$ref": "#/$defs/Spot"}},
                "required": ["spot"],
                "additionalProperties": False,
            },
        },
    }
    allowed = {"mode": "required", "tools": [{"type": "function", "function": {"name": "place"}}]}
    for choice in (
        "required",
        {"type": "function", "function": {"name": "place"}},
        {"type": "allowed_tools", "allowed_tools": allowed},
    ):
        tools = [nested] if choice == "required" else [WEATHER, nested]
        [call] = chat_with_tools(server, tools=tools, tool_choice=choice)["message"]["tool_calls"]
        assert call["function"]["name"] == "place"
        assert json.loads(call["function"]["arguments"])["spot"] in ("here", "there")
    plain = chat_with_tools(server, tool_choice="none", logit_bias={})
    assert plain["message"]["content"] == "Hello wérld"


def test_embeddings_of_fewer_dimensions(server: ServerProcess) -> None:
    body = {"model": "scripted", "input": "ab", "pooling": "mean"}
    whole = server.post("/v1/embeddings", body).json()["data"][0]["embedding"]
    cut = server.post("/v1/embeddings", {**body, "dimensions": 98}).json()["data"][0]["embedding"]
    assert len(cut) == 98
    assert whole[97] == pytest.approx(0.5**0.5, abs=1e-6)
    assert cut[97] == pytest.approx(1.0), "what is left has length 1 again"
    assert (
        server.post("/v1/embeddings", {**body, "dimensions": 9999}).json()["error"]["param"] == "dimensions"
    )
    given = server.post("/v1/embeddings", {**body, "dimensions": 98, "encoding_format": "base64"}).json()
    assert isinstance(given["data"][0]["embedding"], str)


def test_as_many_inputs_as_with_openai(server: ServerProcess) -> None:
    """langchain sends 1000 at once."""
    texts = ["ab", "b"] * 150
    defaults = {"embed_dtype": "float32", "endianness": "native", "normalize": True}  # vLLM's
    body = {"input": texts, "add_special_tokens": True, **defaults}
    data = server.post("/v1/embeddings", body).json()["data"]
    assert [item["index"] for item in data] == list(range(300))
    assert [item["embedding"] for item in data[:2]] * 150 == [item["embedding"] for item in data]
    ranked = server.post("/rerank", {"query": "b", "documents": texts, "top_n": 2}).json()["results"]
    assert [each["index"] for each in ranked] == [0, 1]
    refused = server.post("/v1/embeddings", {"input": ["a"] * 2049})
    assert "at most 2048 items" in refused.json()["error"]["message"]


@pytest.mark.parametrize(
    ("path", "fields", "said"),
    [
        ("/v1/completions", {"prompt": []}, "prompt: List should have at least 1 item"),
        ("/v1/completions", {"prompt": ["a", 5]}, "prompt.1: Input should be a valid string"),
        ("/v1/completions", {"prompt": 5}, "prompt: Input should be a valid string"),
        ("/v1/completions", {"prompt": "a", "stop": ["b", ""]}, "stop.1: String should have at least 1"),
        ("/v1/embeddings", {"input": ["a", ""]}, "input.1: String should have at least 1"),
        ("/v1/chat/completions", {"messages": [{"role": "user"}]}, "messages.0.user.content: Field required"),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": None}]},
            "messages.0.user.content: Input should be a valid string",
        ),
        (
            "/v1/completions",
            {"prompt": "a", "min_tokens": 1, "stop_token_ids": list(range(40)), "guided_choice": ["b"]},
            "min_tokens can suppress",
        ),
    ],
)
def test_a_wrong_value_is_told_as_what_it_most_likely_was(
    server: ServerProcess, path: str, fields: dict[str, Any], said: str
) -> None:
    answer = server.post(path, fields)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["message"].startswith(said)
    assert error["param"] == said.replace(":", ".").replace(" ", ".").split(".")[0]
