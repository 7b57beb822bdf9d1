"""Grammars meant to hurt, over HTTP: their senders get a 400, a victim's stream goes on, nothing is left."""

import contextlib
import json
import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from grammars.hostile import CRASHING, NEVER_MASKS, never_compiles
from grammars.processes import grammar_processes
from grammars.random_grammars import random_grammar

from .server_process import ServerProcess

DIGITS = {"type": "regex", "regex": "[0-9]{30}"}


CLIENT = httpx.Client(timeout=60)
"""One for all: to make one takes so long, in the victim's process, that its gaps would be the test's own."""


@pytest.fixture
def guarded(impatient: ServerProcess) -> ServerProcess:
    """A server with little patience."""
    return impatient


class Victim:
    """Streams completions without end, and notes the longest time between two events."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.longest_gap = 0.0
        self.num_events = 0
        self.errors: list[str] = []
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._read)

    def _read(self) -> None:
        body = {"prompt": "a", "max_tokens": 150, "temperature": 0, "stream": True}
        last = time.monotonic()
        with httpx.Client(timeout=30) as client:
            while not self._is_over.is_set():
                with client.stream("POST", f"{self.url}/v1/completions", json=body) as answer:
                    for line in answer.iter_lines():
                        if '"error"' in line:
                            self.errors.append(line)
                        now = time.monotonic()
                        self.longest_gap, last = max(self.longest_gap, now - last), now
                        self.num_events += 1

    def __enter__(self) -> "Victim":
        self._thread.start()
        while not self.num_events:
            time.sleep(0.01)
        self.longest_gap = 0.0
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()
        assert not self.errors
        assert self.longest_gap < 1.0


def complete(server: ServerProcess, form: dict[str, Any], **more: Any) -> httpx.Response:
    body = {"prompt": "a", "max_tokens": 60, "temperature": 1, "seed": 1, "response_format": form, **more}
    # As bytes: a client that writes surrogates as escapes is one of the attacks.
    headers = {"Content-Type": "application/json"}
    url = f"{server.url}/v1/completions"
    return CLIENT.post(url, content=json.dumps(body).encode(), headers=headers)


def schema(content: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": content}}


@pytest.mark.parametrize(
    ("form", "reason"),
    [
        ({"type": "grammar", "grammar": CRASHING[0]}, "ended the process"),
        (schema(never_compiles(4)), "to compile"),
        ({"type": "grammar", "grammar": NEVER_MASKS}, "to say what may come next"),
        ({"type": "regex", "regex": "(((a{1,1000}){1,1000}){1,1000})"}, "repeats a part"),
        ({"type": "grammar", "grammar": 'root ::= (("a"{1000}){1000}){1000}'}, "repeats a part"),
        ({"type": "grammar", "grammar": "root ::= root"}, "no token"),
        (schema({"$ref": "file:///etc/passwd"}), "files and URLs are not read"),
        (schema({"$ref": "http://127.0.0.1:1/x"}), "files and URLs are not read"),
        (schema({"$ref": "#"}), "refers to itself"),
        (schema({"enum": ["\ud800"]}), "surrogate"),
        (schema({"properties": {"\udfff": {}}}), "surrogate"),
        ({"type": "regex", "regex": "\ud800"}, ""),
        (schema({"type": "strin"}), 'Unsupported type "strin"'),
    ],
)
def test_attacks_are_answered_with_400(guarded: ServerProcess, form: dict[str, Any], reason: str) -> None:
    with Victim(guarded.url):
        answer = complete(guarded, form, logit_bias={str(ord("1")): 100})
        health = guarded.get("/health")
    assert answer.status_code == 400, answer.text
    assert reason in answer.json()["error"]["message"]
    assert not any(place in answer.text for place in (".cc", ".h:", "cpp", "Traceback"))
    assert health.status_code == 200


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_streams_under_grammars_outlive_their_processes(guarded: ServerProcess, how: signal.Signals) -> None:
    wanted = complete(guarded, DIGITS).json()["choices"][0]["text"]
    body = {"prompt": "a", "max_tokens": 60, "temperature": 1, "seed": 1, "response_format": DIGITS}
    text = ""
    with Victim(guarded.url), httpx.Client(timeout=30) as client:
        with client.stream("POST", f"{guarded.url}/v1/completions", json={**body, "stream": True}) as answer:
            for line in answer.iter_lines():
                if line.startswith("data: {"):
                    text += json.loads(line[6:])["choices"][0]["text"]
                    if len(text) == 5:
                        for pid in grammar_processes(guarded.engine_pid):
                            os.kill(pid, how)
    assert text == wanted


def test_a_client_that_leaves_takes_its_grammar_along(guarded: ServerProcess) -> None:
    form = schema(never_compiles(5))
    before = set(grammar_processes(guarded.engine_pid))
    with contextlib.suppress(httpx.ReadTimeout):
        httpx.post(
            f"{guarded.url}/v1/completions",
            json={"prompt": "a", "max_tokens": 9, "response_format": form},
            timeout=0.5,
        )
    end = time.monotonic() + 5
    while set(grammar_processes(guarded.engine_pid)) - before:
        assert time.monotonic() < end
        time.sleep(0.02)
    guarded.wait_until_idle()


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_thousand_random_grammars(guarded: ServerProcess) -> None:
    def status_of(seed: int) -> int:
        kind, text = random_grammar(seed).kind_and_text
        form = schema(json.loads(text)) if kind == "json" else {"type": kind, kind: text}
        answer = complete(guarded, form, max_tokens=12)
        assert ".cc" not in answer.text
        return answer.status_code

    with Victim(guarded.url), ThreadPoolExecutor(8) as pool:
        statuses = list(pool.map(status_of, range(1000)))
    assert set(statuses) <= {200, 400, 422}
    assert statuses.count(400) > 50
    assert guarded.get("/health").status_code == 200
    guarded.wait_until_idle()
