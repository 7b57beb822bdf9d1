"""Keys, queue, time and prompt limits, admin endpoints: on one server that has all of them."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from grammars.processes import grammar_processes, is_alive, nurseries
from ostinato.graphs.errors import ConfigError
from ostinato.server.config import ServerConfig
from ostinato.server.http.keys import KeyCheck
from ostinato.server.openai.errors import ApiError
from ostinato.server.tenants.key_table import KeyTable

from .imported_late import openai
from .server_process import ServerProcess

KEYS = {"Authorization": "Bearer first"}
ADMIN = {"Authorization": "Bearer boss"}
BODY = {"prompt": "a", "max_tokens": 3, "temperature": 0}


@pytest.fixture(scope="module")
def guarded(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    flags = (
        *("--api-key", "first", "--api-key", "sécond", "--admin-key", "boss", "--max-queued-requests", "4"),
        *("--max-body-mb", "0.1", "--request-timeout", "1.5", "--max-prompt-tokens", "20"),
        *("--profile-dir", str(tmp_path_factory.mktemp("profiles")), "--metrics-prefix", "vllm"),
        *("--max-running-requests", "2", "--cuda-graph-bs", "2", "--restart-engine"),
        *("--stream-interval", "5", "--allowed-origins", "http://page.example"),
        *("--max-logprobs", "-1", "--trust-request-chat-template", "--share-prefixes"),
    )
    with ServerProcess(model, *flags) as server:
        yield server


def test_keys(guarded: ServerProcess) -> None:
    assert guarded.post("/v1/completions", BODY, headers=KEYS).status_code == 200
    second = {"Authorization": "bearer sécond".encode()}
    assert guarded.post("/v1/completions", BODY, headers=second).status_code == 200
    for wrong in (
        {},
        {"Authorization": "Bearer firs"},
        {"Authorization": "Basic first"},
        {"Authorization": "first"},
    ):
        answer = guarded.post("/v1/completions", BODY, headers=wrong)
        assert answer.status_code == 401
        assert answer.json()["error"]["code"] == "invalid_api_key"
    for path in ("/v1/models", "/health_generate", "/openapi.json", "/nothing"):
        assert guarded.get(path).status_code == 401, path
    for path in ("/", "/health", "/metrics", "/stats", "/version"):
        assert guarded.get(path).status_code == 200, path
    client = openai.OpenAI(base_url=f"{guarded.url}/v1", api_key="wrong", max_retries=0)
    with pytest.raises(openai.AuthenticationError):
        client.models.list()


def test_keys_share_prefixes_if_told_to(guarded: ServerProcess) -> None:
    def cached(key: str) -> int:
        headers = {"Authorization": f"Bearer {key}".encode()}
        answer = guarded.post("/v1/completions", {**BODY, "prompt": "mississippi rivers"}, headers=headers)
        return int(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])

    assert [cached(key) for key in ("first", "sécond", "boss")] == [0, 16, 16]


def test_log_probabilities_of_all_tokens(guarded: ServerProcess) -> None:
    body = {**BODY, "prompt": "ab", "max_tokens": 1, "logprobs": -1, "prompt_logprobs": -1}
    choice = guarded.post("/v1/completions", body, headers=KEYS).json()["choices"][0]
    assert len(choice["prompt_logprobs"][1]) == 320
    assert choice["prompt_logprobs"][1][str(ord("b"))]["rank"] == 1
    assert len(choice["logprobs"]["top_logprobs"][0]) > 100, "by their texts, some of which are the same"
    messages = [{"role": "user", "content": "a"}]
    chat = {"messages": messages, "max_tokens": 1, "logprobs": True, "top_logprobs": -1}
    told = guarded.post("/v1/chat/completions", chat, headers=KEYS).json()["choices"][0]["logprobs"]
    assert len(told["content"][0]["top_logprobs"]) == 320


def test_templates_of_clients_that_are_trusted(guarded: ServerProcess, server: ServerProcess) -> None:
    messages = [{"role": "user", "content": "a"}]
    body = {"messages": messages, "max_tokens": 3, "temperature": 0}
    chat = {**body, "chat_template": "{{ messages[0].content }}"}
    answer = guarded.post("/v1/chat/completions", chat, headers=KEYS)
    assert answer.json()["choices"][0]["message"]["content"] == "bcd", "no greeting: the prompt is an a"
    for broken, says in (
        ("{% for", "broken"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ 1 / 0 }}", "division"),
        ("{% for i in range(10**9) %}{% endfor %}", "Range too big"),
        ("{{ raise_exception('no') }}", "no"),
        ("{{ 'a' * 10**10 }}", "memory"),
    ):
        refused = guarded.post("/v1/chat/completions", {**body, "chat_template": broken}, headers=KEYS)
        assert refused.status_code == 400, refused.text
        assert refused.json()["error"]["param"] == "chat_template"
        assert says in refused.json()["error"]["message"]
    untrusted = server.post("/v1/chat/completions", chat)
    assert untrusted.status_code == 400
    assert "--trust-request-chat-template" in untrusted.json()["error"]["message"]


def test_origins_that_no_browser_sends_are_refused() -> None:
    """vLLM's way to write them was one origin with brackets, and nobody's."""
    for given, read in (
        (['["*"]'], ("*",)),
        (['["http://a.example", "https://B.example:8"]'], ("http://a.example", "https://b.example:8")),
        (["http://a.example,http://[::1]:3000", "null"], ("http://a.example", "http://[::1]:3000", "null")),
        ("*", ("*",)),
    ):
        assert ServerConfig(allowed_origins=given).allowed_origins == read
    for wrong in ("page.example", "http://page.example/", '["http://a.example"', "['*']"):
        with pytest.raises(ConfigError, match="allowed_origins"):
            ServerConfig(allowed_origins=[wrong])


def test_web_pages_of_allowed_origins_may_ask(guarded: ServerProcess, server: ServerProcess) -> None:
    wanted = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
    for origin, allowed in (("http://page.example", True), ("http://other.example", False)):
        asked = httpx.options(f"{guarded.url}/v1/completions", headers={"Origin": origin, **wanted})
        assert (asked.headers.get("access-control-allow-origin") == origin) is allowed
        answer = guarded.post("/v1/completions", BODY, headers={"Origin": origin, **KEYS})
        assert (answer.headers.get("access-control-allow-origin") == origin) is allowed
    refused = guarded.post("/v1/completions", BODY, headers={"Origin": "http://page.example"})
    assert refused.status_code == 401
    assert "access-control-allow-origin" in refused.headers, "a page can read why"
    plain = server.post("/v1/completions", BODY, headers={"Origin": "http://page.example"})
    assert "access-control-allow-origin" not in plain.headers


def test_admin_key(guarded: ServerProcess) -> None:
    for headers in ({}, KEYS):
        assert guarded.get("/graphs", headers=headers).status_code == 401
    assert guarded.get("/graphs", headers=ADMIN).status_code == 200


def test_admin_without_a_key_is_for_loopback_alone(server: ServerProcess) -> None:
    assert server.get("/graphs").status_code == 200
    for headers in (
        {"X-Forwarded-For": "10.0.0.1"},
        {"Host": "example.com"},
        {"Origin": "http://example.com"},
    ):
        answer = server.get("/graphs", headers=headers)
        assert answer.status_code == 403, headers
        assert answer.json()["error"]["code"] == "admin_only"


def test_open_admin_endpoints_still_want_the_key_of_the_api() -> None:
    open_to_all = key_check(ServerConfig(open_admin=True, api_key="secret"))
    scope = {"type": "http", "path": "/sleep", "client": ("10.0.0.1", 1), "headers": []}
    with pytest.raises(ApiError, match="an API key is needed"):
        open_to_all._check(scope)
    open_to_all._check({**scope, "headers": [(b"authorization", b"Bearer secret")]})
    key_check(ServerConfig(open_admin=True))._check(scope)
    with pytest.raises(ApiError, match="loopback only"):
        key_check(ServerConfig())._check(scope)
    with pytest.raises(ConfigError, match="one of them"):
        ServerConfig(open_admin=True, admin_key="secret")


def key_check(config: ServerConfig) -> KeyCheck:
    return KeyCheck(nothing, KeyTable(config), open_admin=config.open_admin)


async def nothing(*_: object) -> None:
    raise AssertionError


def test_memory_that_cannot_be_given_back_is_named_with_the_flag_for_it(server: ServerProcess) -> None:
    for path in ("/sleep", "/release_memory_occupation"):
        answer = server.post(path, {})
        assert answer.status_code == 400
        assert "enable_sleep_mode" in answer.json()["error"]["message"]
    assert server.get("/is_sleeping").json() == {"is_sleeping": False}


def test_body_and_prompt_limits(guarded: ServerProcess) -> None:
    answer = guarded.post("/v1/completions", {"prompt": "x" * 200_000}, headers=KEYS)
    assert answer.status_code == 413
    answer = guarded.post("/v1/completions", {**BODY, "prompt": "x" * 21}, headers=KEYS)
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "context_length_exceeded"
    assert guarded.post("/v1/completions", {**BODY, "prompt": "x" * 20}, headers=KEYS).status_code == 200


def test_the_queue_is_bounded_and_requests_time_out(guarded: ServerProcess) -> None:
    guarded.post("/pause_generation", headers=ADMIN)
    answers: list[httpx.Response] = []

    def ask(body: dict) -> None:
        answers.append(guarded.post("/v1/completions", body, headers=KEYS))

    stream = {**BODY, "stream": True}
    threads = [threading.Thread(target=ask, args=(body,)) for body in (BODY, stream, {**BODY, "n": 4})]
    try:
        for thread in threads:
            thread.start()
        end = time.monotonic() + 5
        while guarded.engine_statistics()["waiting"] < 6:
            assert time.monotonic() < end
            time.sleep(0.02)
        full = guarded.post("/v1/completions", BODY, headers=KEYS)
        assert full.status_code == 429
        assert full.json()["error"]["code"] == "queue_full"
        assert 1 <= int(full.headers["Retry-After"]) <= 60
        assert guarded.post("/v1/completions", {**BODY, "n": 7}, headers=KEYS).status_code == 400
        for thread in threads:
            thread.join()
    finally:
        guarded.post("/continue_generation", headers=ADMIN)
    assert [answer.status_code for answer in answers] == [504] * 3
    assert all(answer.json()["error"]["code"] == "timeout" for answer in answers)
    assert all("generation is paused" in answer.json()["error"]["message"] for answer in answers)
    ids = [answer.headers["x-request-id"] for answer in answers]
    assert len(set(ids)) == 3
    for id in ids:
        assert guarded.log.count(id) == 1
        assert f"{id} aborted: the request took longer than 1.5 s" in guarded.log
    assert f"{full.headers['x-request-id']} refused: POST /v1/completions 429: 6 requests are" in guarded.log
    guarded.wait_until_idle()
    assert guarded.post("/v1/completions", BODY, headers=KEYS).status_code == 200


def test_stream_interval(guarded: ServerProcess) -> None:
    body = {**BODY, "max_tokens": 16, "stream": True}
    lines = guarded.post("/v1/completions", body, headers=KEYS).text.splitlines()
    texts = [json.loads(line[6:])["choices"][0]["text"] for line in lines if line.startswith("data: {")]
    assert "".join(texts) == "bcdefghijklmnopq"
    # The first token does not wait for others, though some may have come when its chunk is written.
    assert len(texts[0]) < max(map(len, texts))
    assert len(texts) <= 4


def test_abort(guarded: ServerProcess) -> None:
    assert guarded.post("/abort", {"request_id": "cmpl-x"}, headers=ADMIN).status_code == 404
    for body in ({}, {"request_id": "x", "all": True}):
        assert guarded.post("/abort", body, headers=ADMIN).status_code == 400
    body = {**BODY, "max_tokens": 200, "stream": True}
    with httpx.stream("POST", guarded.url + "/v1/completions", json=body, headers=KEYS) as answer:
        name = answer.headers["x-request-id"]
        lines = answer.iter_lines()
        next(lines)
        ended = guarded.post("/abort", {"request_id": name}, headers=ADMIN)
        assert ended.json() == {"aborted": [name]}
        rest = [line for line in lines if line]
        assert '"finish_reason":"abort"' in rest[-2]
        assert rest[-1] == "data: [DONE]"
    assert guarded.post("/abort", {"all": True}, headers=ADMIN).json() == {"aborted": []}


def test_flush_cache(guarded: ServerProcess) -> None:
    def cached() -> int:
        answer = guarded.post("/v1/completions", {**BODY, "prompt": "q" * 20}, headers=KEYS)
        found: int = answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
        return found

    cached()
    assert cached() == 16
    assert guarded.post("/flush_cache", headers=ADMIN).json() == {"flushed": True}
    assert cached() == 0


def test_profile(guarded: ServerProcess) -> None:
    assert guarded.post("/stop_profile", headers=ADMIN).status_code == 400
    started = guarded.post("/start_profile", headers=ADMIN).json()["file"]
    assert guarded.post("/start_profile", headers=ADMIN).status_code == 400
    assert guarded.post("/v1/completions", BODY, headers=KEYS).status_code == 200
    assert guarded.post("/stop_profile", headers=ADMIN).json()["file"] == started
    assert Path(started).stat().st_size > 1000


def test_vllm_names(guarded: ServerProcess) -> None:
    text = guarded.metrics()
    for name in ("num_requests_running", "kv_cache_usage_perc", "time_to_first_token_seconds_bucket"):
        assert f"vllm:{name}{{" in text


def test_engine_is_restarted_if_asked_for(guarded: ServerProcess) -> None:
    form = {"type": "regex", "regex": "[0-9]{3}"}
    assert guarded.post("/v1/completions", {**BODY, "response_format": form}, headers=KEYS).status_code == 200
    before = guarded.engine_pid
    its_grammars = [*nurseries(before), *grammar_processes(before)]
    assert len(its_grammars) > 1
    os.kill(before, signal.SIGKILL)
    with httpx.Client(base_url=guarded.url, timeout=30) as client:
        for status, seconds in ((503, 5), (200, 40)):
            end = time.monotonic() + seconds
            while client.get("/health").status_code != status:
                assert time.monotonic() < end
                time.sleep(0.02)
            if status == 503:
                assert client.post("/pause", headers=ADMIN).status_code == 503
    assert guarded.engine_pid != before
    assert not any(map(is_alive, its_grammars)), "nothing is left of the one that was killed"
    assert guarded.get("/is_paused", headers=ADMIN).json() == {"is_paused": False}
    answer = guarded.post("/v1/completions", BODY, headers=KEYS)
    assert answer.json()["choices"][0]["text"] == "bcd"
    assert 'ostinato:engine_restarts_total{model_name="scripted"} 1.0' in guarded.metrics()


def test_the_engine_leaves_with_the_server(guarded: ServerProcess) -> None:
    """The last test with this server."""
    engine = guarded.engine_pid
    guarded.process.kill()
    end = time.monotonic() + 10
    while is_alive(engine):
        assert time.monotonic() < end
        time.sleep(0.05)
