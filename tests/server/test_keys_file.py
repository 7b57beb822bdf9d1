"""The file of keys: what is in it, what its quotas do, and what happens when it changes."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest

from ostinato.graphs.errors import ConfigError
from ostinato.server.config import ServerConfig
from ostinato.server.tenants.key_file import KeyFileError, read_keys
from ostinato.server.tenants.key_table import KeyTable
from ostinato.server.tenants.quotas import Limits, Quota, Refusal, Window

from .server_process import ServerProcess

BODY = {"prompt": "a", "max_tokens": 2, "temperature": 0}


def written(file: Path, *keys: dict[str, Any]) -> Path:
    """Written as one should: it takes the place of the old one at once."""
    beside = file.with_suffix(".new")
    beside.write_text(json.dumps({"keys": keys}))
    beside.chmod(0o600)
    beside.rename(file)
    return file


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def until(is_so: Callable[[], bool], seconds: float = 10) -> None:
    end = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < end
        time.sleep(0.05)


def test_both_formats_say_the_same(tmp_path: Path) -> None:
    digest = hashlib.sha256(b"two").hexdigest()
    as_json = written(
        tmp_path / "keys.json",
        {"name": "a", "key": "one", "weight": 2, "scopes": ["inference", "admin"], "expires": "2030-01-31"},
        {"name": "b", "sha256": digest, "requests_per_minute": 5, "expires": "2030-01-31T10:00:00Z"},
    )
    as_toml = tmp_path / "keys.toml"
    as_toml.write_text(
        f"""
        [[keys]]
        name = "a"
        key = "one"
        weight = 2.0
        scopes = ["inference", "admin"]
        expires = 2030-01-31
        [[keys]]
        name = "b"
        sha256 = "{digest.upper()}"
        requests_per_minute = 5
        expires = 2030-01-31T10:00:00Z
        """
    )
    first, second = read_keys(as_json)
    assert read_keys(as_toml) == [first, second]
    assert second.digest == hashlib.sha256(b"two").digest()
    assert first.is_valid(datetime(2030, 1, 31, 23, tzinfo=UTC))
    assert not first.is_valid(datetime(2030, 2, 1, tzinfo=UTC))
    assert not second.is_valid(datetime(2030, 1, 31, 10, tzinfo=UTC))


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ([], "no keys"),
        ([{"name": "a"}], "key or sha256"),
        ([{"name": "a", "key": "x", "sha256": "0" * 64}], "key or sha256"),
        ([{"name": "a", "key": ""}], "empty"),
        ([{"name": "a b", "key": "x"}], "letters"),
        ([{"name": "a", "sha256": "12"}], "64"),
        ([{"name": "a", "key": "x"}, {"name": "a", "key": "y"}], "name of 'a' is there twice"),
        ([{"name": "a", "key": "x"}, {"name": "b", "key": "x"}], "key of 'b' is there twice"),
        ([{"name": "a", "key": "x", "weight": 0}], "weight"),
        ([{"name": "a", "key": "x", "weight": "2"}], "float"),
        ([{"name": "a", "key": "x", "scopes": ["inferences"]}], "inferences"),
        ([{"name": "a", "key": "x", "scopes": []}], "scopes"),
        ([{"name": "a", "key": "x", "expires": "soon"}], "expires"),
        ([{"name": "a", "key": "x", "requests_per_minute": 0}], ">= 1"),
        ([{"name": "a", "key": "x", "request_per_minute": 1}], "request_per_minute"),
    ],
)
def test_what_is_wrong_is_said(tmp_path: Path, keys: list[Any], says: str) -> None:
    file = written(tmp_path / "keys.json", *keys)
    with pytest.raises(KeyFileError, match=says):
        read_keys(file)
    with pytest.raises(ConfigError, match="api_keys_file"):
        KeyTable(ServerConfig(api_keys_file=str(file)))


def test_files_that_are_none(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "broken.json").write_text('{"keys": [{"name": "a", "key": "hidden"')
    for name, says in (("fifo", "ordinary"), ("nothing", "No such file"), ("broken.json", "not valid JSON")):
        with pytest.raises(KeyFileError, match=says) as raised:
            read_keys(tmp_path / name)
        assert "hidden" not in str(raised.value)
    twice = written(tmp_path / "keys.json", {"name": "a", "key": "one"})
    with pytest.raises(ConfigError, match="among the flags"):
        KeyTable(ServerConfig(api_keys_file=str(twice), api_key="one"))


def test_a_window_holds_a_minute() -> None:
    window = Window()
    for second in range(30):
        window.add(2, 100.5 + second)
    assert window.used(130) == 60
    assert window.seconds_until(60, 130) == 0
    assert window.seconds_until(59, 130) == 31
    assert window.seconds_until(0, 130) == 60
    assert window.used(161) == 58, "the first is more than a minute old"
    assert window.used(191) == 0


def test_quotas_say_which_limit_and_when() -> None:
    quota = Quota("me", Limits(tokens_per_minute=100, requests_at_once=1))
    quota.begin()
    with pytest.raises(Refusal, match=r"requests_at_once.*limit is 1, 1 are used"):
        quota.begin()
    quota.take_prompt(90, 1)
    for _ in range(20):
        quota.take_token()
    quota.end()
    with pytest.raises(Refusal, match=r"tokens_per_minute.*limit is 100, 110 are used") as raised:
        quota.begin()
    assert raised.value.status == 429
    assert 55 <= int(raised.value.headers["Retry-After"]) <= 61
    assert raised.value.headers["x-ratelimit-remaining-tokens"] == "0"
    with pytest.raises(Refusal, match="at least 101 tokens") as raised:
        Quota("me", Limits(tokens_per_minute=100)).take_prompt(100, 1)
    assert raised.value.status == 400, "no wait would help"


SOON = (datetime.now(UTC) + timedelta(days=1)).date().isoformat()
KEYS: tuple[dict[str, Any], ...] = (
    {"name": "plain", "key": "plain-key", "expires": SOON},
    {"name": "few", "key": "few-key", "requests_per_minute": 3, "requests_at_once": 2},
    {"name": "little", "key": "little-key", "tokens_per_minute": 12},
    {"name": "ops", "sha256": hashlib.sha256(b"ops-key").hexdigest(), "scopes": ["admin"]},
    {"name": "scraper", "key": "scraper-key", "scopes": ["metrics"]},
    {"name": "old", "key": "old-key", "expires": "2020-01-01"},
)


@pytest.fixture(scope="module")
def keyed(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[ServerProcess, Path]]:
    file = written(tmp_path_factory.mktemp("keys") / "keys.json", *KEYS)
    with ServerProcess(model, "--api-keys-file", str(file), "--api-key", "flag") as server:
        yield server, file


def test_scopes_and_expiry(keyed: tuple[ServerProcess, Path]) -> None:
    server, _ = keyed
    for key, statuses in {
        "plain-key": (200, 403, 403),
        "flag": (200, 401, 401),
        "ops-key": (403, 200, 403),
        "scraper-key": (403, 403, 200),
        "old-key": (401, 401, 401),
        "nobody": (401, 401, 401),
    }.items():
        found = (
            server.post("/v1/completions", BODY, headers=bearer(key)).status_code,
            server.get("/graphs", headers=bearer(key)).status_code,
            server.get("/metrics", headers=bearer(key)).status_code,
        )
        assert found == statuses, key
    assert server.get("/health").status_code == 200
    assert server.get("/metrics").status_code == 401


def test_quotas_of_requests_and_tokens(keyed: tuple[ServerProcess, Path]) -> None:
    server, _ = keyed
    for left in (2, 1, 0):
        answer = server.post("/v1/completions", BODY, headers=bearer("few-key"))
        assert answer.status_code == 200
        assert answer.headers["x-ratelimit-limit-requests"] == "3"
        assert answer.headers["x-ratelimit-remaining-requests"] == str(left)
        assert answer.headers["x-ratelimit-reset-requests"].endswith("s")
    answer = server.post("/v1/completions", BODY, headers=bearer("few-key"))
    assert answer.status_code == 429
    assert 50 <= int(answer.headers["Retry-After"]) <= 61
    error = answer.json()["error"]
    assert error["type"] == "rate_limit_error"
    assert "requests_per_minute" in error["message"]
    assert "3 are used" in error["message"]
    little = bearer("little-key")
    assert server.post("/v1/completions", {**BODY, "prompt": "x" * 12}, headers=little).status_code == 400
    answer = server.post("/v1/completions", {**BODY, "max_tokens": 20}, headers=little)
    assert answer.status_code == 200, "what has begun is served"
    answer = server.post("/v1/completions", BODY, headers=little)
    assert answer.status_code == 429
    assert "tokens_per_minute" in answer.json()["error"]["message"]

    def refused_of_few() -> list[str]:
        metrics = server.get("/metrics", headers=bearer("scraper-key")).text
        assert "few-key" not in metrics
        refused = [line for line in metrics.splitlines() if "tenant_requests_refused_total{" in line]
        of_few = [
            line for line in refused if 'tenant="few"' in line and 'reason="requests_per_minute"' in line
        ]
        return [line.split()[-1] for line in of_few]

    until(lambda: refused_of_few() == ["1.0"])  # metrics are written once in a while


def test_changes_take_effect_and_broken_files_none(keyed: tuple[ServerProcess, Path]) -> None:
    server, file = keyed

    def status(key: str) -> int:
        return server.post("/v1/completions", BODY, headers=bearer(key)).status_code

    written(file, *KEYS, {"name": "new", "key": "new-key"})
    until(lambda: status("new-key") == 200)
    file.write_text("{")
    until(lambda: "the keys read before stay in force" in server.log)
    assert status("new-key") == 200
    metrics = server.get("/metrics", headers=bearer("scraper-key")).text
    assert 'keys_file_in_force{model_name="scripted"} 0.0' in metrics
    assert 'keys_file_errors_total{model_name="scripted"} 1.0' in metrics
    written(file, *KEYS)
    server.process.send_signal(signal.SIGHUP)
    until(lambda: status("new-key") == 401)
    assert status("plain-key") == 200
    file.chmod(0o644)
    server.process.send_signal(signal.SIGHUP)
    until(lambda: "other users can read it" in server.log)


def test_a_revoked_key_ends_its_streams(keyed: tuple[ServerProcess, Path]) -> None:
    server, file = keyed
    written(file, *KEYS, {"name": "leaked", "key": "leaked-key"})
    long = {"prompt": "a", "max_tokens": 250, "n": 64, "ignore_eos": True, "stream": True}
    until(lambda: server.get("/v1/models", headers=bearer("leaked-key")).status_code == 200)
    url = f"{server.url}/v1/completions"
    with httpx.stream("POST", url, json=long, headers=bearer("leaked-key"), timeout=60) as answer:
        events = (line for line in answer.iter_lines() if line.startswith("data: "))
        next(events)
        written(file, *KEYS)
        last = list(events)[-1]
    error = json.loads(last.removeprefix("data: "))["error"]
    assert error["code"] == "invalid_api_key"
    assert "revoked" in error["message"]
    assert server.get("/v1/models", headers=bearer("leaked-key")).status_code == 401
