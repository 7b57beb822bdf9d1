"""The file of `--api-keys-file`: who may use the server, for what, and how much of it.

TOML if its name ends with .toml, else JSON:

    [[keys]]                                   {"keys": [{
    name = "alice"                                 "name": "alice",
    key = "sk-..."          # or sha256 = "..."    "key": "sk-...",
    weight = 2.0                                   "weight": 2.0,
    scopes = ["inference"]                         "scopes": ["inference"],
    expires = 2027-01-31                           "expires": "2027-01-31",
    requests_per_minute = 600                      "requests_per_minute": 600,
    tokens_per_minute = 100000                     "tokens_per_minute": 100000,
    requests_at_once = 20                          "requests_at_once": 20}]}
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import os
import re
import stat
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from .quotas import Limits

MAX_BYTES = 16 * 2**20
Scope = Literal["inference", "admin", "metrics"]
_SHA256 = re.compile(r"[0-9a-fA-F]{64}")
_NAME = re.compile(r"[A-Za-z0-9._:@+-]{1,64}")
_Limit = Annotated[int, msgspec.Meta(ge=1)]


class KeyFileError(Exception):
    """The file cannot be used."""


class Key(msgspec.Struct, frozen=True):
    """One key."""

    name: str
    digest: bytes
    """Its SHA-256."""
    weight: float
    scopes: frozenset[str]
    expires: datetime | None
    limits: Limits
    is_of_file: bool = True
    """Its owner has given it a name and scopes."""

    def is_valid(self, now: datetime) -> bool:
        """Whether it has not expired."""
        return self.expires is None or now < self.expires


class _Entry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: str
    key: str | None = None
    sha256: str | None = None
    weight: float = 1.0
    scopes: tuple[Scope, ...] = ("inference",)
    expires: Any = None
    requests_per_minute: _Limit | None = None
    tokens_per_minute: _Limit | None = None
    requests_at_once: _Limit | None = None


class _File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    keys: list[_Entry]


Signature = tuple[int, int, int]
"""By which a changed file is known: time of the change, size, inode."""


def signature_of(path: Path) -> Signature | None:
    """Returns the file's signature; None if it is not there."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino


def is_open_to_others(path: Path) -> bool:
    """Whether users besides its owner may read the file."""
    return os.name == "posix" and bool(path.stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO))


def read_keys(path: Path) -> list[Key]:
    """Returns the keys of the file. Raises KeyFileError with what is wrong with it."""
    try:
        found = path.stat()
        if not stat.S_ISREG(found.st_mode):
            raise KeyFileError("it is not an ordinary file")
        if found.st_size > MAX_BYTES:
            raise KeyFileError(f"it has {found.st_size:,} bytes, at most {MAX_BYTES:,} are read")
        text = path.read_bytes()
    except OSError as error:
        raise KeyFileError(error.strerror or str(error)) from error
    decode = msgspec.toml.decode if path.suffix == ".toml" else msgspec.json.decode
    try:
        entries = decode(text, type=_File).keys
    except msgspec.ValidationError as error:
        raise KeyFileError(str(error)) from error
    except (msgspec.DecodeError, ValueError) as error:  # which may quote the line that it is in
        kind = "TOML" if path.suffix == ".toml" else "JSON"
        raise KeyFileError(f"it is not valid {kind}") from error
    if not entries:
        raise KeyFileError("it has no keys")
    keys = [_key(entry) for entry in entries]
    for what, values in (("name", [key.name for key in keys]), ("key", [key.digest for key in keys])):
        if len(set(values)) < len(values):
            twice = next(key.name for at, key in enumerate(keys) if values[at] in values[:at])
            raise KeyFileError(f"the {what} of {twice!r} is there twice")
    return keys


def digest_of(key: bytes) -> bytes:
    """Returns the SHA-256 of a key."""
    return hashlib.sha256(key).digest()


def _key(entry: _Entry) -> Key:
    if not _NAME.fullmatch(entry.name):
        raise KeyFileError(f"the name {entry.name[:80]!r} must have 1 to 64 letters, digits and ._:@+-")
    if (entry.key is None) == (entry.sha256 is None):
        raise KeyFileError(f"{entry.name!r} needs key or sha256, one of them")
    if entry.key == "":
        raise KeyFileError(f"the key of {entry.name!r} is empty")
    if entry.sha256 is not None and not _SHA256.fullmatch(entry.sha256):
        raise KeyFileError(f"the sha256 of {entry.name!r} must have 64 hexadecimal digits")
    if not (math.isfinite(entry.weight) and 0.001 <= entry.weight <= 1000):
        raise KeyFileError(f"the weight of {entry.name!r} must be 0.001 to 1000")
    if not entry.scopes:
        raise KeyFileError(f"{entry.name!r} has no scopes")
    digest = digest_of(entry.key.encode()) if entry.key is not None else bytes.fromhex(entry.sha256 or "")
    limits = Limits(entry.requests_per_minute, entry.tokens_per_minute, entry.requests_at_once)
    return Key(
        entry.name, digest, entry.weight, frozenset(entry.scopes), _end(entry.name, entry.expires), limits
    )


def _end(name: str, given: object) -> datetime | None:
    """Returns when a key expires: a date means the end of that day, times without an offset are UTC."""
    if isinstance(given, str):
        with contextlib.suppress(ValueError):
            given = date.fromisoformat(given) if len(given) == 10 else datetime.fromisoformat(given)
    if isinstance(given, datetime):
        return given if given.tzinfo is not None else given.replace(tzinfo=UTC)
    if isinstance(given, date):
        return datetime(given.year, given.month, given.day, tzinfo=UTC) + timedelta(days=1)
    if given is None:
        return None
    raise KeyFileError(f"expires of {name!r} must be a date such as 2027-01-31, or a date and a time")
