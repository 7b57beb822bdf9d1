"""Requests generated from the OpenAPI document: right ones and wrong ones, none of them answered 500."""

from collections import Counter
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings

from ostinato.server.http.keys import WEIGHT_PATHS

from .imported_late import requests
from .server_process import ServerProcess

AFTERWARDS = {
    "/pause": "/resume",
    "/pause_generation": "/continue_generation",
    "/sleep": "/wake_up",
    "/start_profile": "/stop_profile",
}
"""What would change the server for the requests behind, and how it is undone."""
SGLANG_ADAPTER_PATHS = {"/load_lora_adapter", "/load_lora_adapter_from_tensors", "/unload_lora_adapter"}
"""Answer as SGLang does, also when they refuse."""


def fuzz(
    server: ServerProcess, examples: int, without: Collection[str] = ()
) -> tuple[Counter[int], Counter[str]]:
    """Statuses, and 2xx by path, of so many requests per endpoint, but for some paths."""
    schemathesis = pytest.importorskip("schemathesis", reason="pip install schemathesis")
    statuses: Counter[int] = Counter()
    successes: Counter[str] = Counter()
    session = requests.Session()
    schema = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
    for found in schema.get_all_operations():
        operation = found.ok()
        if operation.path in without:
            continue
        for mode in (schemathesis.GenerationMode.POSITIVE, schemathesis.GenerationMode.NEGATIVE):
            if mode is schemathesis.GenerationMode.NEGATIVE and not operation.body:
                continue

            @settings(
                max_examples=examples,
                deadline=None,
                database=None,
                derandomize=True,
                suppress_health_check=list(HealthCheck),
            )
            @given(case=operation.as_strategy(generation_mode=mode))
            def ask(case: Any) -> None:
                answer = case.call(session=session, timeout=60)
                statuses[answer.status_code] += 1
                check(case, answer)
                if answer.status_code < 300:
                    successes[case.path] += 1
                if case.path in AFTERWARDS:
                    session.post(server.url + AFTERWARDS[case.path], timeout=60)

            ask()
    return statuses, successes


def check(case: Any, answer: Any) -> None:
    assert answer.status_code != 500, answer.text
    if answer.status_code >= 400 and case.path in SGLANG_ADAPTER_PATHS and "error" not in answer.json():
        assert answer.json()["success"] is False
        assert answer.json()["error_message"]
    elif answer.status_code >= 400:
        error = answer.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}, answer.text
        assert error["message"]
    elif "json" in answer.headers["content-type"][0]:
        case.validate_response(answer)


@pytest.mark.slow
def test_requests_made_from_the_document(server: ServerProcess) -> None:
    # Those for trainers take as long as all others; the longer test has them.
    statuses, successes = fuzz(server, 4, without=WEIGHT_PATHS)
    assert sum(statuses.values()) > 60
    assert {"/v1/models", "/detokenize", "/v1/embeddings", "/rerank", "/graphs"} <= successes.keys()
    assert sum(successes.values()) >= 20
    server.wait_until_idle()


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_two_thousand_requests_made_from_the_document(model: Path) -> None:
    with ServerProcess(model, "--request-timeout", "30") as server:
        statuses, successes = fuzz(server, 40)
        print(dict(statuses), dict(successes))
        assert sum(statuses.values()) >= 2000
        assert sum(successes.values()) >= 300
        assert server.get("/health").status_code == 200
        server.wait_until_idle()
