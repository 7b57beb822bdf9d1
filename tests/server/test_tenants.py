"""Clients with different keys: what one has asked does not show in another's answers."""

import asyncio
from typing import Any

import pytest

from ostinato.server.config import ServerConfig
from ostinato.server.http.keys import KeyCheck
from ostinato.server.tenants.key_table import KeyTable
from ostinato.server.tenants.tenant import salted

from .server_process import ServerProcess

LONG = "abcdefghij" * 12


def cached(server: ServerProcess, key: str, path: str = "/v1/completions", **fields: Any) -> int:
    headers = {"Authorization": f"Bearer {key}"}
    answer = server.post(path, {"prompt": LONG, "max_tokens": 1, **fields}, headers=headers)
    return int(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])


def test_keys_share_no_cached_prefixes(keyed: ServerProcess) -> None:
    assert cached(keyed, "one") == 0
    assert cached(keyed, "one") > 0
    assert cached(keyed, "two") == 0, "another key's prompt is not found"
    assert cached(keyed, "three") == 0
    assert cached(keyed, "one", cache_salt="x") == 0
    assert cached(keyed, "one", cache_salt="x") > 0
    assert cached(keyed, "two", cache_salt="x") == 0
    admin = {"Authorization": "Bearer three"}
    assert keyed.post("/flush_cache", headers=admin).status_code == 200
    assert keyed.post("/flush_cache", headers={"Authorization": "Bearer one"}).status_code == 401
    assert keyed.get("/graphs", headers=admin).status_code == 200
    [line] = [line for line in keyed.log.splitlines() if " admin: POST /flush_cache" in line]
    assert "admin: POST /flush_cache by 127.0.0.1 with key " in line
    assert ": 200 in " in line
    assert "three" not in line


@pytest.mark.parametrize(
    ("options", "is_shared"),
    [
        ({"api_key": ("one",)}, True),
        ({"api_key": ("one", "two"), "share_prefixes": True}, True),
        ({"api_key": ("one", "two")}, False),
        ({"api_key": ("one",), "admin_key": "boss"}, False),
    ],
    ids=["one key", "by option", "two keys", "one key and the admin's"],
)
def test_prefixes_are_shared_by_one_key_or_by_option(options: dict[str, Any], is_shared: bool) -> None:
    """A request goes on with the salt of all others, or with one of its key."""
    salts: list[str | None] = []

    async def app(*_: object) -> None:
        salts.append(salted("x"))

    async def ask(key: str) -> None:
        headers = [(b"authorization", f"Bearer {key}".encode())]
        scope = {"type": "http", "path": "/v1/completions", "headers": headers}
        check = KeyCheck(app, KeyTable(ServerConfig(**options)), open_admin=False)
        await check(scope, None, None)  # type: ignore[arg-type]

    keys = [*options["api_key"], *([options["admin_key"]] if "admin_key" in options else [])]
    for key in (*keys, *keys):
        asyncio.run(ask(key))
    assert salts[: len(keys)] == salts[len(keys) :]
    assert (salts == ["x"] * len(salts)) is is_shared
    assert len(set(salts)) == (1 if is_shared else len(keys))
