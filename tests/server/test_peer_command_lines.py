"""Servers started with command lines of vLLM and SGLang, and what they say while they serve."""

import re
import shlex
import time
from pathlib import Path

import httpx
import pytest
from typer.testing import CliRunner

from ostinato.cli.main import app
from ostinato.graphs.errors import ConfigError
from ostinato.server import serving
from ostinato.server.config import ServerConfig

from .server_process import ServerProcess

VLLM = """
{model} --host 127.0.0.1 --port 0 --max-model-len 256 --max-num-seqs 8
--max-num-batched-tokens 64 --gpu-memory-utilization 0.8 --tensor-parallel-size 1 -pp 1 -dp 1 --block-size 16
--trust-remote-code --dtype float --load-format safetensors --seed 0 --tokenizer {model} --tokenizer-mode auto
--chat-template {template} --enable-auto-tool-choice --tool-call-parser auto --no-enable-prefix-caching
--enable-chunked-prefill --attention-backend TORCH_SDPA --kv-cache-dtype auto --swap-space 4
--compilation-config '{{"cudagraph_capture_sizes": [1, 8, 64], "level": 3}}' --nnodes 1 --node-rank 0
--distributed-executor-backend mp --hf-overrides '{{}}' --runner auto --enable-request-id-headers
--generation-config vllm --override-generation-config '{{"max_new_tokens": 4}}' --enable-log-requests
--max-log-len 100 --api-key one two --scheduling-policy fcfs --limit-mm-per-prompt '{{"image": 1}}'
--num-gpu-blocks-override 200 --max-logprobs 20 --uvicorn-log-level warning --download-dir {folder}
"""
SGLANG = """
--model-path {model} --host 127.0.0.1 --port 0 --served-model-name scripted --context-length 256
--max-running-requests 8 --chunked-prefill-size 64 --mem-fraction-static 0.8 --tp 1 --dp-size 1 --ep-size 1
--pp-size 1 --page-size 16 --trust-remote-code --dtype float32 --load-format auto --random-seed 0
--tokenizer-path {model} --tokenizer-mode auto --tokenizer-worker-num 1 --chat-template {template}
--tool-call-parser auto --disable-radix-cache --attention-backend torch_native --sampling-backend pytorch
--kv-cache-dtype auto --cuda-graph-bs 1 8 --nnodes 1 --node-rank 0 --dist-init-addr 127.0.0.1:5000
--disaggregation-mode null --max-prefill-tokens 16384 --max-total-tokens 3200 --log-level info
--watchdog-timeout 300 --enable-torch-compile --torch-compile-max-bs 8 --load-balance-method round_robin
--enable-metrics --enable-cache-report --log-requests --log-requests-level 1 --sampling-defaults openai
--preferred-sampling-params '{{"max_new_tokens": 4}}' --api-key one --schedule-policy lpm --device cpu
--disable-overlap-schedule --stream-interval 1 --grammar-backend xgrammar --skip-server-warmup
"""
KEY = {"Authorization": "Bearer one"}


def line_of(template: str, model: Path, folder: Path) -> list[str]:
    jinja = folder / "template.jinja"
    jinja.write_text("X{{ messages[-1].content }}{% if add_generation_prompt %}<|assistant|>{% endif %}")
    return shlex.split(template.format(model=model, template=jinja, folder=folder))


@pytest.mark.parametrize(
    ("peer", "module"),
    [("vllm", "ostinato"), pytest.param("sglang", "ostinato.launch_server", marks=pytest.mark.slow)],
)
def test_a_command_line_of_a_peer_starts_a_server(
    peer: str, module: str, model: Path, tmp_path: Path
) -> None:
    line = line_of(VLLM if peer == "vllm" else SGLANG, model, tmp_path)
    assert sum(word.startswith("-") for word in line) >= 40
    with ServerProcess(model, *line, module=module, bare=True) as server:
        body = {"messages": [{"role": "user", "content": "Hi"}]}
        answer = server.post("/v1/chat/completions", body, headers=KEY)
        assert answer.status_code == 200, answer.text
        answered = answer.json()
        # max_new_tokens of the generation config: the whole greeting has five tokens and an end.
        assert answered["usage"]["completion_tokens"] == 4
        assert answered["choices"][0]["finish_reason"] == "length"
        ids = server.post("/tokenize", body, headers=KEY).json()["tokens"]
        prompt = server.post("/detokenize", {"tokens": ids}, headers=KEY).json()["prompt"]
        assert prompt == "XHi<|assistant|>", "the chat template is the one that was given"
        # A model has the name that it was given on the command line, and no other.
        given, other = (str(model), model.name) if peer == "vllm" else ("scripted", str(model))
        assert [each["id"] for each in server.get("/v1/models", headers=KEY).json()["data"]] == [given]
        assert server.get(f"/v1/models/{given}", headers=KEY).json()["id"] == given
        named = server.post("/v1/chat/completions", {**body, "model": given}, headers=KEY)
        assert (named.status_code, named.json()["model"]) == (200, given)
        for name in (other, f"{given}/"):
            unknown = server.post("/v1/chat/completions", {**body, "model": name}, headers=KEY)
            assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "model_not_found")
        refused = server.post("/v1/chat/completions", {**body, "top_p": 7}, headers=KEY)
        assert refused.status_code == 400
        assert server.post("/v1/chat/completions", body).status_code == 401
        end = time.monotonic() + 10
        while "401: an API key is needed" not in server.log and time.monotonic() < end:
            time.sleep(0.05)
        log = server.log
    id = answered["id"]
    assert f"{id} began: " in log
    assert re.search(rf"{id} ended: length; \d+ tokens in, 4 out, first after .* s, .* s in all", log)
    name = refused.headers["x-request-id"]
    assert f"{name} refused: POST /v1/chat/completions 400: top_p: " in log
    assert "refused: POST /v1/chat/completions 401: an API key is needed" in log
    assert "Hi" not in log.replace("Hi-", ""), "what was said is nobody's business"
    if peer == "sglang":
        assert "--enable-torch-compile has no effect: " in log


def test_the_key_of_vllms_environment_protects_too(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[ServerConfig] = []
    monkeypatch.setattr(serving, "serve", lambda _, config: started.append(config) or 0)
    monkeypatch.setenv("VLLM_API_KEY", "theirs")
    for own, line, keys in (
        (None, [], ("theirs",)),
        ("ours", [], ("ours",)),
        (None, ["--api-key", "given"], ("given",)),
    ):
        if own is not None:
            monkeypatch.setenv("OSTINATO_API_KEY", own)
        assert CliRunner().invoke(app, ["serve", *line]).exit_code == 0
        assert started[-1].api_key == keys
        monkeypatch.delenv("OSTINATO_API_KEY", raising=False)


def test_a_client_that_leaves_is_logged_with_the_id_it_got(server: ServerProcess) -> None:
    body = {"prompt": "a", "stream": True, "max_tokens": 250, "n": 8, "ignore_eos": True}
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=30) as answer:
        id = answer.headers["x-request-id"]
        next(answer.iter_lines())
    end = time.monotonic() + 10
    while f"{id} aborted" not in server.log and time.monotonic() < end:
        time.sleep(0.05)
    log = server.log
    assert (
        re.search(rf"{id} (aborted: the client has gone; 1 tokens in, \d+ out|ended)", log) or id not in log
    )
    assert "began" not in log, "lines about every request are for those who ask for them"


def test_no_line_shows_what_was_said(server: ServerProcess) -> None:
    call = {"id": "x", "type": "function", "function": {"name": "f", "arguments": '{"pin": 4711'}}
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "tool_calls": [call]}]
    refused = server.post("/v1/chat/completions", {"messages": messages})
    assert "not JSON: Expecting ',' delimiter at character 12" in refused.json()["error"]["message"]
    end = time.monotonic() + 10
    while f"{refused.headers['x-request-id']} refused" not in server.log and time.monotonic() < end:
        time.sleep(0.05)
    assert "Expecting ',' delimiter" in server.log
    assert "4711" not in server.log


def test_a_wrong_command_line_is_refused_in_one_line(model: Path) -> None:
    flags = ["--chat-template", "nowhere.jinja"]
    process = ServerProcess(model, str(model), "--port", "0", *flags, bare=True, wait=False)
    assert process.process.wait(60) == 1
    log = process.log
    process._end()
    assert "chat_template: there is no chat template 'nowhere.jinja'" in log
    assert "Traceback" not in log
    assert log.count("\n") == 1


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--tensor-parallel-size", "2"], "--tensor-parallel-size can only be 1, not 2: one engine uses"),
        (["--model", "other"], "two models were given"),
    ],
)
def test_flags_that_cannot_be_served_are_named(
    model: Path, flags: list[str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serving, "serve", lambda *_: pytest.fail("it starts"))
    told = CliRunner().invoke(app, ["serve", str(model), *flags])
    assert isinstance(told.exception, ConfigError)
    assert message in str(told.exception)
