"""Clients with different keys: what one has asked does not show in another's answers."""

from pathlib import Path
from typing import Any

import pytest

from .server_process import ServerProcess

LONG = "abcdefghij" * 12


def cached(server: ServerProcess, key: str, path: str = "/v1/completions", **fields: Any) -> int:
    headers = {"Authorization": f"Bearer {key}"}
    answer = server.post(path, {"prompt": LONG, "max_tokens": 1, **fields}, headers=headers)
    return int(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])


def test_keys_share_no_cached_prefixes(model: Path) -> None:
    with ServerProcess(model, "--api-key", "one", "--api-key", "two", "--admin-key", "three") as server:
        assert cached(server, "one") == 0
        assert cached(server, "one") > 0
        assert cached(server, "two") == 0, "another key's prompt is not found"
        assert cached(server, "three") == 0
        assert cached(server, "one", cache_salt="x") == 0
        assert cached(server, "one", cache_salt="x") > 0
        assert cached(server, "two", cache_salt="x") == 0
        admin = {"Authorization": "Bearer three"}
        assert server.post("/flush_cache", headers=admin).status_code == 200
        assert server.post("/flush_cache", headers={"Authorization": "Bearer one"}).status_code == 401
        assert server.get("/graphs", headers=admin).status_code == 200
        [line] = [line for line in server.log.splitlines() if " admin: " in line]
        assert "admin: POST /flush_cache by 127.0.0.1 with key " in line
        assert ": 200 in " in line
        assert "three" not in line


@pytest.mark.parametrize(
    "flags", [("--api-key", "one"), ("--api-key", "one", "--api-key", "two", "--share-prefixes")]
)
def test_prefixes_are_shared_by_one_key_or_by_option(model: Path, flags: tuple[str, ...]) -> None:
    with ServerProcess(model, *flags) as server:
        assert cached(server, "one") == 0
        assert cached(server, "two" if "two" in flags else "one") > 0
