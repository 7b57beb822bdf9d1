"""A server that sleeps, is paused, and wakes: no request is lost or wrong, and no call kills it."""

import json
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from .scripted_model import counted
from .server_process import ServerProcess

TEXT = counted("a", 40)
BODY = {"model": "scripted", "prompt": "a", "max_tokens": 40, "temperature": 0, "ignore_eos": True}
LONG = {"max_tokens": 230}
LONG_TEXT = counted("a", 230)
TAGS = {"weights", "kv_cache", "graphs"}


@pytest.fixture
def server(sleepy: ServerProcess) -> Iterator[ServerProcess]:
    yield sleepy
    assert sleepy.post("/wake_up").status_code == 200
    assert sleepy.post("/v1/completions", BODY).json()["choices"][0]["text"] == TEXT
    sleepy.wait_until_idle()


class Asked:
    """A completion that is read in a thread, as it comes."""

    def __init__(self, server: ServerProcess, **options: Any) -> None:
        self._url = f"{server.url}/v1/completions"
        self._body = {**BODY, "stream": True, **options}
        self._begun, self._text, self.finish_reason = threading.Event(), "", ""
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def _read(self) -> None:
        with httpx.stream("POST", self._url, json=self._body, timeout=30) as answer:
            for line in answer.iter_lines():
                if line.startswith("data: {"):
                    [choice] = json.loads(line[6:])["choices"]
                    self._text += choice["text"]
                    self.finish_reason = choice["finish_reason"]
                    self._begun.set()

    def begun(self) -> "Asked":
        assert self._begun.wait(20)
        return self

    @property
    def is_over(self) -> bool:
        return not self._thread.is_alive()

    @property
    def text(self) -> str:
        self._thread.join(30)
        assert self.is_over
        return self._text


def until(server: ServerProcess, **counts: int) -> None:
    end = time.monotonic() + 20
    while True:
        now = server.engine_statistics()
        if all(now[name] == count for name, count in counts.items()):
            return
        assert time.monotonic() < end, now
        time.sleep(0.02)


def is_sleeping(server: ServerProcess) -> bool:
    found: bool = server.get("/is_sleeping").json()["is_sleeping"]
    return found


def test_memory_goes_and_comes_back_and_what_was_done_is_told(server: ServerProcess) -> None:
    before = server.engine_statistics()["memory_bytes"]
    slept = server.post("/sleep?level=1").json()
    assert set(slept["tags"]) == TAGS
    assert slept["released"] >= before["weights"] + before["kv"]
    assert 0 < slept["backed_up"] < slept["released"]
    assert slept["seconds"]
    assert server.get("/is_sleeping").json() == {"is_sleeping": True}
    assert server.get("/is_paused").json() == {"is_paused": True}
    graphs = server.get("/graphs").json()
    assert graphs["memory"]["weights"] == graphs["memory"]["kv"] == graphs["memory"]["activations"] == 0
    assert graphs["last_sleep"]["released"] == slept["released"]
    assert server.post("/sleep?level=1").json()["released"] == 0, "a retry is harmless"
    assert server.post("/wake_up?tags=weights").json()["tags"] == ["weights"]
    assert is_sleeping(server)
    assert set(server.post("/wake_up?tags=weights&tags=kv_cache").json()["tags"]) == {"kv_cache", "graphs"}
    assert not is_sleeping(server)
    assert server.post("/wake_up").json()["tags"] == []
    assert server.get("/graphs").json()["memory"] == before


def test_requests_wait_for_a_sleeping_server_which_says_why_it_generates_nothing(
    server: ServerProcess,
) -> None:
    server.post("/sleep")
    asked = [Asked(server), Asked(server)]
    until(server, waiting=2)
    assert server.get("/health").status_code == 200
    probe = server.get("/health_generate")
    assert probe.status_code == 503
    assert "released: " in probe.json()["error"]["message"]
    assert not any(each.is_over for each in asked)
    server.post("/wake_up")
    assert [each.text for each in asked] == [TEXT, TEXT]


@pytest.mark.parametrize("mode", ["abort", "wait", "keep"])
@pytest.mark.parametrize("call", ["/sleep", "/pause"])
def test_requests_under_way_end_or_go_on_as_the_mode_says(
    server: ServerProcess, call: str, mode: str
) -> None:
    asked = Asked(server, **LONG).begun()
    assert server.post(f"{call}?mode={mode}").status_code == 200
    late = Asked(server)
    if mode == "keep":
        time.sleep(0.1)
        assert not asked.is_over
    else:
        assert LONG_TEXT.startswith(asked.text)
        assert asked.finish_reason == ("abort" if mode == "abort" else "length")
    assert not late.is_over
    assert server.post("/resume" if call == "/pause" else "/wake_up").status_code == 200
    assert late.text == TEXT
    if mode != "abort":
        assert asked.text == LONG_TEXT


def test_one_that_is_waited_for_can_leave(server: ServerProcess) -> None:
    asked = Asked(server, **LONG, request_id="mine").begun()
    pause = threading.Thread(target=server.post, args=("/pause?wait_for_inflight_requests=true",))
    pause.start()
    aborted = server.post("/abort_requests", {"request_ids": ["cmpl-mine", "other"]}).json()
    assert aborted == {"status": "aborted", "aborted": 1}
    assert LONG_TEXT.startswith(asked.text)
    assert asked.finish_reason == "abort"
    pause.join(20)
    assert server.get("/is_paused").json() == {"is_paused": True}
    assert server.post("/abort_requests").json() == {"status": "aborted", "aborted": 0}


def test_answers_name_the_weights_they_were_computed_with(server: ServerProcess) -> None:
    version = server.get("/model_info").json()["weight_version"]
    chat = {"model": "scripted", "messages": [{"role": "user", "content": "hi"}]}
    assert server.post("/v1/chat/completions", chat).json()["metadata"] == {"weight_version": version}
    assert server.post("/v1/completions", BODY).json()["metadata"] == {"weight_version": version}
    for path, body in (("/v1/chat/completions", chat), ("/v1/completions", BODY)):
        chunks = server.post(path, {**body, "stream": True}).text.split("\n\n")
        assert [f'"weight_version":"{version}"' in chunk for chunk in chunks[:-2]] == [False] * (
            len(chunks) - 3
        ) + [True]
    answer = server.post("/v1/responses", {"model": "scripted", "input": "hi"}).json()
    assert answer["weight_version"] == version
    generated = server.post("/generate", {"text": "a", "sampling_params": {"max_new_tokens": 3}}).json()
    assert generated["meta_info"]["weight_version"] == version


def test_mistakes_are_named_and_change_nothing(server: ServerProcess) -> None:
    for path, body, status, message in (
        ("/sleep?level=3", None, 400, "unknown sleep level 3"),
        ("/sleep?level=much", None, 400, "level"),
        ("/sleep?mode=now", None, 400, "unknown mode 'now'"),
        ("/wake_up?tags=weight", None, 400, "unknown tag 'weight'"),
        ("/pause?mode=now", None, 400, "unknown mode 'now'"),
        ("/sleep?levle=2", None, 400, "parameter 'levle' is not supported: there are level, mode"),
        ("/sleep?level=1&level=2", None, 400, "level is given twice"),
        ("/wake_up?tag=weights", None, 400, "parameter 'tag' is not supported: there are tags"),
        ("/pause?mod=keep", None, 400, "parameter 'mod' is not supported"),
        ("/resume?tags=weights", None, 400, "parameter 'tags' is not supported: this call has none"),
        ("/release_memory_occupation?tags=weights", {}, 400, "parameter 'tags' is not supported"),
        ("/release_memory_occupation", {"tags": ["cuda"]}, 400, "unknown tag 'cuda'"),
        ("/release_memory_occupation", {"tag": ["weights"]}, 400, "tag"),
        ("/pause_generation", {"mode": "wait"}, 400, "mode"),
        ("/flush_cache?timeout=-1", None, 400, "timeout: "),
        ("/wake_up?tags=%ED%A0%80", None, 400, "unknown tag"),
        ("/sleep", {"options": {"level": 2**70}}, 400, "cannot be passed on"),
        ("/continue_generation", {"": 1}, 400, "a field without a name is not supported"),
        ("/sleep", {"model": "another"}, 404, "another"),
    ):
        answer = server.post(path, body)
        assert answer.status_code == status, (path, answer.text)
        assert message in answer.json()["error"]["message"], path
    half = b'{"options": {"tags": ["\\ud800"]}}'
    answer = httpx.post(f"{server.url}/wakeup", content=half, headers={"Content-Type": "application/json"})
    assert answer.status_code == 400
    assert not is_sleeping(server)
    assert server.get("/is_paused").json() == {"is_paused": False}


def test_a_trainer_on_another_machine_is_let_in_where_the_server_was_started_for_it(
    server: ServerProcess,
) -> None:
    for headers in ({"Host": "trainer.example"}, {"X-Forwarded-For": "10.0.0.1"}):
        assert server.get("/is_sleeping", headers=headers).status_code == 200


def test_rays_and_vllms_other_calls(server: ServerProcess) -> None:
    assert server.post("/sleep", {"model": "scripted", "options": {"level": 0}}).status_code == 200
    assert server.post("/is_sleeping", {"model": "scripted"}).json() == {"is_sleeping": True}
    assert (
        server.post("/wakeup", {"model": "scripted", "options": {"tags": ["scheduling"]}}).status_code == 200
    )
    assert not is_sleeping(server)
    assert server.post("/reset_prefix_cache?reset_running_requests=true&reset_external=true").json() == {
        "success": True
    }
    for path in ("/reset_mm_cache", "/reset_encoder_cache"):
        assert server.post(path).status_code == 200
    assert server.get("/get_world_size?include_dp=false").json() == {"world_size": 1}


def test_sglangs_calls(server: ServerProcess) -> None:
    asked = Asked(server, **LONG).begun()
    busy = server.get("/flush_cache")
    assert busy.status_code == 400
    assert "1 requests run" in busy.json()["error"]["message"]
    assert server.post("/flush_cache?timeout=30").json() == {"flushed": True}
    assert asked.text == LONG_TEXT
    for mode in ("in_place", "retract"):
        asked = Asked(server, **LONG).begun()
        assert server.post("/pause_generation", {"mode": mode}).json()["status"] == "ok"
        assert (server.get("/flush_cache").status_code == 200) == (mode == "retract")
        assert server.post("/continue_generation", {"torch_empty_cache": True}).json()["status"] == "ok"
        assert asked.text == LONG_TEXT
    assert server.get("/server_info").json()["enable_memory_saver"] is True
    gone = server.post("/release_memory_occupation", {"tags": ["kv_cache"]}).json()
    assert gone["tags"] == ["kv_cache", "graphs"]
    assert server.get("/release_memory_occupation").json()["tags"] == ["weights"]
    server.post("/pause_generation", {})
    for tags, back in ((["weights"], ["weights"]), (["cuda_graph"], ["graphs"]), (None, ["kv_cache"])):
        assert server.post("/resume_memory_occupation", {"tags": tags}).json()["tags"] == back
    assert server.get("/is_paused").json() == {"is_paused": True}, "only continue ends a pause"
    late = Asked(server, **LONG, rid="mine")
    until(server, waiting=1)
    assert server.get("/v1/loads?include=core").json()["loads"][0]["num_total_reqs"] == 1
    assert server.post("/abort_request", {"rid": "other"}).json() == {"aborted": []}
    assert server.post("/abort_request", {"rid": "mine"}).json() == {"aborted": ["mine"]}
    assert late.text == ""
    assert late.finish_reason == "abort"
    server.post("/continue_generation", {})
