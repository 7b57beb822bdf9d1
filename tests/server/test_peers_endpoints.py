"""Endpoints and payloads of SGLang and vLLM: their own, those of their benchmark clients, and small ones."""

import asyncio
import json
from itertools import pairwise
from pathlib import Path

import pytest

from ostinato.server.config import ServerConfig
from ostinato.server.openai.conversation import Tool
from ostinato.server.openai.errors import ApiError
from ostinato.server.openai.served_model import ServedModel
from ostinato.server.wire.messages import Ready

from .scripted_model import counted
from .server_process import ServerProcess

GREEDY = {"temperature": 0, "max_new_tokens": 5}


def events(text: str) -> list[dict]:
    assert text.endswith("data: [DONE]\n\n"), text[-100:]
    return [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]


TAG = {"type": "structural_tag", "format": {"type": "const_string", "value": "yes"}}


def test_generate(server: ServerProcess) -> None:
    answer = server.post("/generate", {"text": "xa", "sampling_params": GREEDY}).json()
    assert answer["text"] == "bcdef"
    assert answer["output_ids"] == list(b"bcdef")
    about = answer["meta_info"]
    assert about["finish_reason"] == {"type": "length", "length": 5}
    assert (about["prompt_tokens"], about["completion_tokens"], about["cached_tokens"]) == (2, 5, 0)
    assert about["e2e_latency"] > 0
    by_ids = server.post("/generate", {"input_ids": [ord("a")], "sampling_params": GREEDY, "rid": "mine"})
    assert (by_ids.json()["text"], by_ids.json()["meta_info"]["id"]) == ("bcdef", "mine")
    stopped = {**GREEDY, "max_new_tokens": 50, "stop": ["fg"]}
    answer = server.post("/generate", {"text": "a", "sampling_params": stopped}).json()
    assert answer["text"] == "bcde"
    assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": "fg"}
    assert len(server.post("/generate", {"text": "a"}).json()["output_ids"]) == 128


def test_generate_for_a_list(server: ServerProcess) -> None:
    params = [GREEDY, {**GREEDY, "max_new_tokens": 2}]
    answers = server.post("/generate", {"text": ["a", "k"], "sampling_params": params, "rid": "r"}).json()
    assert [answer["text"] for answer in answers] == ["bcdef", "lm"]
    assert [answer["meta_info"]["id"] for answer in answers] == ["r_0", "r_1"]
    several = server.post("/generate", {"text": "a", "sampling_params": {**GREEDY, "n": 2}}).json()
    assert [answer["text"] for answer in several] == ["bcdef"] * 2


def test_generate_streams_the_whole_text_every_time(server: ServerProcess) -> None:
    body = {"text": "a", "sampling_params": {**GREEDY, "max_new_tokens": 20}, "stream": True}
    found = events(server.post("/generate", body).text)
    texts = [event["text"] for event in found]
    assert texts[-1] == counted("a", 20)
    assert all(later.startswith(earlier) for earlier, later in pairwise(texts))
    assert len(found) > 3
    assert [event["meta_info"]["finish_reason"] for event in found[:-1]] == [None] * (len(found) - 1)
    both = events(server.post("/generate", {**body, "text": ["a", "k"]}).text)
    last = {event["index"]: event["text"] for event in both}
    assert last == {0: counted("a", 20), 1: counted("k", 20)}


def test_generate_with_logprobs(server: ServerProcess) -> None:
    body = {
        "text": "abz",
        "sampling_params": {**GREEDY, "max_new_tokens": 2},
        "return_logprob": True,
        "logprob_start_len": 0,
        "top_logprobs_num": 2,
        "return_text_in_logprobs": True,
    }
    for stream in (False, True):
        answer = server.post("/generate", {**body, "stream": stream})
        about = (events(answer.text)[-1] if stream else answer.json())["meta_info"]
        assert [entry[1:] for entry in about["input_token_logprobs"]] == [[97, "a"], [98, "b"], [122, "z"]]
        values = [entry[0] for entry in about["input_token_logprobs"]]
        assert values[0] is None
        assert values[1] > -1 > values[2]
        assert [entry[1:] for entry in about["output_token_logprobs"]] == [[123, "{"], [124, "|"]]
        assert about["output_top_logprobs"][0][0] == about["output_token_logprobs"][0]
        assert len(about["output_top_logprobs"][0]) == 2
        assert about["input_top_logprobs"][0] is None
    of_the_answer = server.post("/generate", {**body, "logprob_start_len": -1}).json()["meta_info"]
    assert of_the_answer["input_token_logprobs"] == []
    prompt_only = {**body, "sampling_params": {"max_new_tokens": 0}}
    assert server.post("/generate", prompt_only).json()["output_ids"] == []


def test_generate_in_a_shape(server: ServerProcess) -> None:
    for shape, text in (
        ({"regex": "[0]{3}"}, "000"),
        ({"ebnf": 'root ::= "<x>"'}, "<x>"),
        ({"json_schema": '{"enum": ["yes"]}'}, '"yes"'),
        ({"structural_tag": json.dumps(TAG)}, "yes"),
    ):
        params = {"max_new_tokens": 9, **shape}
        assert server.post("/generate", {"text": "a", "sampling_params": params}).json()["text"] == text


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "text"),
        ({"text": "a", "input_ids": [1]}, "text"),
        ({"text": "a", "sampling_params": {"temprature": 1}}, "sampling_params.temprature"),
        ({"text": "a", "sampling_params": {"max_new_tokens": 9999}}, "sampling_params.max_new_tokens"),
        ({"text": "a", "sampling_params": {"json_schema": "{"}}, "sampling_params.json_schema"),
        ({"text": "a", "sampling_params": {"structural_tag": "{"}}, "sampling_params.structural_tag"),
        ({"text": ["a", "b"], "sampling_params": [{}]}, "sampling_params"),
        ({"text": "x" * 300}, "text"),
        ({"text": "a", "lora_path": "x"}, "lora_path"),
        ({"text": "a", "return_hidden_states": True}, "return_hidden_states"),
        ({"text": "abc", "return_logprob": True, "logprob_start_len": 4}, "logprob_start_len"),
        ({"text": "a", "image_data": "x"}, "image_data"),
    ],
)
def test_what_generate_refuses(server: ServerProcess, body: dict, param: str) -> None:
    answer = server.post("/generate", body)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param


def test_what_the_server_says_about_itself(server: ServerProcess, model: Path) -> None:
    for path in ("/get_model_info", "/model_info"):
        found = server.get(path).json()
        assert (found["model_path"], found["is_generation"]) == (str(model), True)
    for path in ("/get_server_info", "/server_info"):
        found = server.get(path).json()
        assert (found["context_length"], found["max_running_requests"]) == (256, 16)
        assert isinstance(found["internal_states"], list)


def test_small_endpoints(server: ServerProcess) -> None:
    import httpx

    assert server.get("/ping").status_code == server.post("/ping").status_code == 200
    head = httpx.head(server.url + "/health")
    assert (head.status_code, head.content) == (200, b"")
    assert server.get("/health/").status_code == server.get("/v1/models/").status_code == 200
    body = {"prompt": "a", "temperature": 0, "max_tokens": 3}
    assert server.post("/v1/completions/", body).json()["choices"][0]["text"] == "bcd"
    assert server.get("/flush_cache").status_code == 200
    assert 'path="/health"' in server.metrics()
    assert 'path="/health/"' not in server.metrics()


def test_score_and_rerank(server: ServerProcess) -> None:
    answer = server.post("/score", {"text_1": "xa", "text_2": ["ya", "b"]}).json()
    assert [(each["index"], each["score"]) for each in answer["data"]] == [(0, 1.0), (1, 0.0)]
    assert answer["usage"]["prompt_tokens"] == 5
    pairs = server.post("/v1/score", {"queries": ["a", "b"], "documents": ["a", "c"]}).json()
    assert [each["score"] for each in pairs["data"]] == [1.0, 0.0]
    body = {"query": "a", "documents": ["b", "xa", "a"], "top_n": 2}
    for path in ("/rerank", "/v1/rerank", "/v2/rerank"):
        results = server.post(path, body).json()["results"]
        assert [each["index"] for each in results] == [1, 2]
        assert results[0] == {"index": 1, "relevance_score": 1.0, "document": {"text": "xa"}}
    assert "document" not in server.post("/rerank", {**body, "return_documents": False}).json()["results"][0]
    for wrong in ({}, {"text_1": "a"}, {"text_1": ["a", "b"], "text_2": ["c"] * 3}):
        assert server.post("/score", wrong).json()["error"]["param"] == "text_1"


# -- what the peers' benchmark clients send ----------------------------------------------------------


def test_the_payloads_of_vllm_bench_serve(server: ServerProcess) -> None:
    completion = {
        "model": "scripted",
        "prompt": "a",
        "repetition_penalty": 1.0,
        "max_tokens": 6,
        "logprobs": None,
        "stream": True,
        "stream_options": {"include_usage": True},
        "ignore_eos": True,
        "temperature": 0.0,
    }
    answer = server.post("/v1/completions", completion, headers={"x-request-id": "bench-serve-0"})
    found = events(answer.text)
    assert "".join(each["choices"][0]["text"] for each in found if each["choices"]) == "bcdefg"
    assert found[-1]["usage"]["completion_tokens"] == 6
    chat = {
        "model": "scripted",
        "messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}],
        "max_completion_tokens": 6,
        "stream": True,
        "stream_options": {"include_usage": True},
        "ignore_eos": True,
        "temperature": 0.0,
    }
    found = events(server.post("/v1/chat/completions", chat).text)
    assert found[-1]["usage"]["completion_tokens"] == 6
    assert found[0]["choices"][0]["delta"]["content"] == ""
    embedding = {"model": "scripted", "input": "a", "truncate_prompt_tokens": -1}
    assert server.post("/v1/embeddings", embedding).json()["usage"]["total_tokens"] == 1
    ranking = {"model": "scripted", "query": "a", "documents": ["b"], "truncate_prompt_tokens": -1}
    assert server.post("/v1/rerank", ranking).json()["usage"]["total_tokens"] == 2


def test_the_payloads_of_sglang_bench_serving(server: ServerProcess) -> None:
    native = {
        "text": "a",
        "sampling_params": {"temperature": 0.0, "max_new_tokens": 6, "ignore_eos": True},
        "stream": True,
        "lora_path": None,
        "return_logprob": False,
        "return_routed_experts": False,
        "logprob_start_len": -1,
    }
    found = events(server.post("/generate", native).text)
    assert found[-1]["text"] == "bcdefg"
    assert found[-1]["meta_info"]["completion_tokens"] == 6
    assert server.post("/generate", {**native, "return_logprob": True}).status_code == 200
    completion = {
        "model": "scripted",
        "prompt": "a",
        "best_of": 1,
        "max_tokens": 6,
        "stream": True,
        "temperature": 0.0,
        "ignore_eos": True,
    }
    found = events(server.post("/v1/completions", completion).text)
    assert "".join(each["choices"][0]["text"] for each in found) == "bcdefg"
    chat = {
        "model": "scripted",
        "messages": [{"role": "user", "content": "a"}],
        "max_completion_tokens": 6,
        "stream": False,
        "temperature": 0.0,
        "ignore_eos": True,
    }
    answer = server.post("/v1/chat/completions", chat).json()
    assert answer["usage"]["completion_tokens"] == 6
    states = server.get("/server_info").json()["internal_states"]
    assert states[0].get("avg_spec_accept_length") is None


# -- without a server process ------------------------------------------------------------------------


def served(directory: Path, **options: str) -> ServedModel:
    ready = Ready(str(directory), str(directory), "X", 64, 4, 320, 320, False, True, [1], {}, "")
    return ServedModel("m", ready, ServerConfig(**options), None)  # type: ignore[arg-type]


def test_parsers_under_the_names_of_the_peers(tmp_path: Path) -> None:
    kinds = {name: served(tmp_path, tool_call_parser=name).tool_call_kind for name in ("hermes", "qwen25")}
    assert kinds == {"hermes": "qwen", "qwen25": "qwen"}
    assert served(tmp_path, tool_call_parser="llama3_json").tool_call_kind == "llama"
    assert served(tmp_path).tool_call_kind == "none"


def test_tools_that_the_template_would_drop_are_refused(tmp_path: Path) -> None:
    template = {"chat_template": "{% for m in messages %}{{ m.content }}{% endfor %}"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(template))
    ready = Ready(str(tmp_path), str(tmp_path), "X", 64, 4, 320, 320, True, True, [1], {}, "")
    model = ServedModel("m", ready, ServerConfig(), object())  # type: ignore[arg-type]
    tool = Tool.model_validate({"type": "function", "function": {"name": "f"}})
    with pytest.raises(ApiError, match="no place for tools") as refused:
        asyncio.run(model.encode_chat([], [tool]))
    assert refused.value.param == "tools"
