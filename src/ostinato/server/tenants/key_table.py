"""All keys, whether they come from flags, the environment or a file, and the tenants they stand for."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import signal
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

from ostinato.graphs.errors import ConfigError

from ..config import ServerConfig
from ..log_lines import announce
from .key_file import Key, KeyFileError, digest_of, is_open_to_others, read_keys, signature_of
from .quotas import Limits, Refusal
from .tenant import AddressTenants, Tenant

POLL_SECONDS = 0.5
"""Between two looks at the file. It is read when it looks the same twice, so that nobody reads half of it."""


class KeyTable:
    """Which keys there are now."""

    def __init__(self, config: ServerConfig) -> None:
        """Raises ConfigError if the file cannot be used."""
        self.addresses = AddressTenants()
        self.num_errors = 0
        """How often a changed file could not be used."""
        self.is_current = True
        """Whether the file as it is now is in force."""
        self.has_admins = False
        """Whether some key has the scope admin."""
        self.guards_metrics = False
        """Whether metrics need a key: some key of the file has that scope."""
        self._config = config
        self._path = None if config.api_keys_file is None else Path(config.api_keys_file)
        self._tenants: dict[str, Tenant] = {}
        self._keys: dict[bytes, Key] = {}
        try:
            self._take(self._read())
        except KeyFileError as error:
            raise ConfigError(f"api_keys_file {self._path}: {error}") from error

    @property
    def is_needed(self) -> bool:
        """Whether the API needs a key."""
        return bool(self._config.api_key) or self._path is not None

    @property
    def tenants(self) -> list[Tenant]:
        """The tenants of all keys."""
        return list(self._tenants.values())

    def key(self, sent: bytes) -> Key:
        """Returns the valid key that was sent; 401 if there is none.

        Keys are found by their SHA-256, which tells nothing about how near a wrong one came, and compared in
        constant time.
        """
        digest = digest_of(sent)
        found = self._keys.get(digest)
        if found is None or not hmac.compare_digest(found.digest, digest):
            what = "the API key is wrong" if sent else "an API key is needed, as a bearer token"
            raise unauthorized(what)
        if not found.is_valid(datetime.now(UTC)):
            raise unauthorized("the API key has expired")
        return found

    def tenant(self, key: Key) -> Tenant:
        """Returns whom a key stands for."""
        return self._tenants[key.name]

    def refusal(self, digest: bytes) -> Refusal | None:
        """Returns why requests under way with this key have to end; None: they have not."""
        key = self._keys.get(digest)
        if not digest or (key is not None and key.is_valid(datetime.now(UTC))):
            return None
        return unauthorized("the API key was revoked" if key is None else "the API key has expired")

    async def watch(self, on_change: Callable[[], None]) -> None:
        """Read the file again whenever it has changed, and at once on SIGHUP; `on_change` is called when keys
        may have ended."""
        if self._path is None:
            return
        path, told = self._path, asyncio.Event()
        loop = asyncio.get_running_loop()
        with contextlib.suppress(NotImplementedError, ValueError, AttributeError):
            loop.add_signal_handler(signal.SIGHUP, told.set)
        in_force = before = signature_of(path)
        while True:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(told.wait(), POLL_SECONDS)
            now = signature_of(path)
            if told.is_set() or (now != in_force and now == before):
                told.clear()
                in_force = now
                await self._reload()
            before = now
            on_change()

    async def _reload(self) -> None:
        try:
            self._take(await asyncio.to_thread(self._read))
        except KeyFileError as error:
            self.num_errors += 1
            self.is_current = False
            announce(f"api_keys_file {self._path}: {error}; the keys read before stay in force")
            return
        self.is_current = True
        announce(f"api_keys_file {self._path}: read again, {len(self._keys)} keys are in force")

    def _read(self) -> list[Key]:
        if self._path is None:
            return []
        keys = read_keys(self._path)
        if self._config.open_admin and any("admin" in key.scopes for key in keys):
            raise KeyFileError("with open_admin no key can have the scope admin: every client has it")
        if is_open_to_others(self._path):
            announce(f"api_keys_file {self._path}: other users can read it; chmod 600 makes it yours alone")
        return keys

    def _take(self, of_file: list[Key]) -> None:
        keys = [*self._of_flags(), *of_file]
        for what, values in (("name", [key.name for key in keys]), ("key", [key.digest for key in keys])):
            if len(set(values)) < len(values):
                raise KeyFileError(f"a {what} is there and among the flags, too")
        tells_apart = len(keys) > 1 and not self._config.share_prefixes
        tenants: dict[str, Tenant] = {}
        for key in keys:
            tenant = self._tenants.get(key.name) or Tenant(key.name, label=key.name)
            tenant.weight, tenant.quota.limits = key.weight, key.limits
            tenant.salt = key.name if tells_apart else ""
            tenants[key.name] = tenant
        self._tenants = tenants
        self._keys = {key.digest: key for key in keys}
        self.has_admins = any("admin" in key.scopes for key in keys)
        self.guards_metrics = any("metrics" in key.scopes for key in of_file)

    def _of_flags(self) -> list[Key]:
        config = self._config
        given = dict.fromkeys(config.api_key)
        keys = [
            _of_flag(f"key-{at}", key, "inference")
            for at, key in enumerate(given, 1)
            if key != config.admin_key
        ]
        if config.admin_key:
            keys.append(_of_flag("admin", config.admin_key, "inference", "admin", "metrics"))
        return keys


def _of_flag(name: str, key: str, *scopes: str) -> Key:
    return Key(name, digest_of(key.encode()), 1.0, frozenset(scopes), None, Limits(), is_of_file=False)


def unauthorized(message: str) -> Refusal:
    """401 for a key that is not there, wrong or not valid any more."""
    return Refusal(401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})
