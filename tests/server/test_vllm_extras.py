"""vLLM's extras that act on tokens and on the prefix cache, in requests to a server."""

import os
from pathlib import Path

import pytest

from .server_process import ServerProcess

CHAT = {"model": "scripted", "messages": [{"role": "user", "content": "Say hello"}], "temperature": 0}
TEXT = {"model": "scripted", "prompt": "a", "temperature": 0, "max_tokens": 5}


def text_of(server: ServerProcess, **extras: object) -> str:
    answer = server.post("/v1/completions", {**TEXT, **extras})
    assert answer.status_code == 200, answer.text
    text: str = answer.json()["choices"][0]["text"]
    return text


def test_only_allowed_tokens_come(server: ServerProcess) -> None:
    """The model counts on; what may not come is the end of it."""
    assert set(text_of(server, allowed_token_ids=list(b"xyz"), temperature=1)) <= set("xyz")
    assert text_of(server) == "bcdef"
    chat = server.post("/v1/chat/completions", {**CHAT, "allowed_token_ids": list(b"xyz"), "max_tokens": 4})
    assert set(chat.json()["choices"][0]["message"]["content"]) <= set("xyz")


def test_bad_words_do_not_come(server: ServerProcess) -> None:
    text = text_of(server, bad_words=["cde"])
    assert text.startswith("bcd")
    assert "cde" not in text
    assert not text_of(server, bad_words=["b"]).startswith("b")
    messages = [{"role": "user", "content": "count"}, {"role": "assistant", "content": "so: a"}]
    goes_on = {**CHAT, "messages": messages, "continue_final_message": True, "max_tokens": 3}
    chat = server.post("/v1/chat/completions", {**goes_on, "bad_words": ["cd"]}).json()
    said = chat["choices"][0]["message"]["content"]
    assert said.startswith("bc")
    assert not said.startswith("bcd")


def test_lists_and_a_shape_together(server: ServerProcess) -> None:
    extras = {"guided_regex": "[0-9]{4}", "bad_words": ["11", "22", "33"], "temperature": 1, "max_tokens": 9}
    for seed in range(3):
        text = text_of(server, allowed_token_ids=[*b"123x", *range(256, 300)], seed=seed, **extras)
        assert len(text) == 4
        assert set(text) <= set("123")
        assert all(pair not in text for pair in ("11", "22", "33"))


@pytest.mark.parametrize("stream", [False, True])
def test_lists_that_come_to_exclude_each_other_are_the_clients_fault(
    server: ServerProcess, stream: bool
) -> None:
    body = {**TEXT, "allowed_token_ids": [98], "bad_words": ["bb"], "stream": stream}
    answer = server.post("/v1/completions", body)
    assert "leave no token that is allowed" in answer.text
    if not stream:
        assert answer.status_code == 400
    assert text_of(server) == "bcdef", "nobody else is harmed"


def test_salts_divide_the_prefix_cache(server: ServerProcess) -> None:
    prompt = "a prompt of more than two pages, which nobody else sends"
    cached = []
    for salt in ("one", "two", "one", None):
        body = {**TEXT, "prompt": prompt, "cache_salt": salt}
        usage = server.post("/v1/completions", body).json()["usage"]
        cached.append(usage["prompt_tokens_details"]["cached_tokens"])
    assert cached == [0, 0, 48, 0]


def test_tokens_of_one_text_are_not_mistaken_for_each_other(server: ServerProcess) -> None:
    """Parts of characters have the same text: the likeliest one stood for the one that came."""
    body = {"prompt": [199], "allowed_token_ids": [210], "logprobs": 1, "max_tokens": 1, "temperature": 0}
    found = server.post("/v1/completions", body).json()["choices"][0]["logprobs"]
    assert found["token_logprobs"][0] < -10
    assert found["top_logprobs"] == [{"\ufffd": found["token_logprobs"][0]}]


def test_logprobs_of_named_tokens(server: ServerProcess) -> None:
    named = [ord("b"), ord("x"), ord("y")]
    extras = {"logprobs": 1, "logprob_token_ids": named, "max_tokens": 1}
    told = server.post("/v1/completions", {**TEXT, **extras}).json()["choices"][0]["logprobs"]
    assert set(told["top_logprobs"][0]) == {"b", "x", "y"}
    assert told["top_logprobs"][0]["b"] == told["token_logprobs"][0] > told["top_logprobs"][0]["x"]
    chat = {**CHAT, "logprobs": True, "logprob_token_ids": named, "max_tokens": 1}
    [entry] = server.post("/v1/chat/completions", chat).json()["choices"][0]["logprobs"]["content"]
    assert {each["token"] for each in entry["top_logprobs"]} == {"b", "x", "y", entry["token"]}


@pytest.mark.parametrize(
    ("extras", "said"),
    [
        ({"logprob_token_ids": [98]}, "needs logprobs"),
        ({"logprob_token_ids": [9999], "logprobs": 1}, "9999 is not a token id"),
        ({"logprob_token_ids": [98], "logprobs": 1, "echo": True}, "echoed prompt"),
        ({"vllm_xargs": {"target": 98}}, "without --logits-processors"),
    ],
)
def test_extras_that_cannot_act_are_refused(
    server: ServerProcess, extras: dict[str, object], said: str
) -> None:
    answer = server.post("/v1/completions", {**TEXT, **extras})
    assert answer.status_code == 400
    assert said in answer.json()["error"]["message"]


@pytest.mark.slow
def test_a_servers_own_logits_processors(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]), prepend=os.pathsep)
    with ServerProcess(model, "--logits-processors", "server.forcing_processor:Forcing") as server:
        assert text_of(server, vllm_xargs={"target": ord("x")}) == "xxxxx"
        assert text_of(server) == "bcdef"
        answer = server.post("/v1/completions", {**TEXT, "vllm_xargs": {"target": "x"}})
        assert answer.status_code == 400
        assert "target must be a token id" in answer.text
        assert text_of(server) == "bcdef"
