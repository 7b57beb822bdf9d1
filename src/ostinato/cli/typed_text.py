"""What was typed: as an argument, or on standard input, which may be closed or hold any bytes."""

from __future__ import annotations

import sys

from ostinato.graphs.errors import ConfigError


def as_text(typed: str) -> str:
    """The same, with the bytes that Python could not decode read as UTF-8, whatever the locale says."""
    try:
        return typed.encode(errors="surrogateescape").decode()
    except UnicodeError:
        raise ConfigError("what was typed is not text in UTF-8") from None


def all_of_standard_input() -> str:
    """What there is to read, up to its end."""
    if sys.stdin is None:
        raise ConfigError("- reads the prompt from standard input, which is closed")
    return as_text(sys.stdin.read())


def line_of_standard_input() -> str:
    """The next line, for `as_text`; empty at the end."""
    return sys.stdin.readline() if sys.stdin is not None else ""
