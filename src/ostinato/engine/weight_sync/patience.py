"""Waiting for a trainer no longer than agreed, in calls that know no limit of their own."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, TypeVar

from .errors import TransferTimeout

_Found = TypeVar("_Found")


def within(seconds: float, what: str, function: Callable[[], _Found]) -> _Found:
    """What `function` returns. TransferTimeout if it takes longer: it goes on, and nobody looks at it."""
    outcome: list[Any] = []

    def run() -> None:
        try:
            outcome.extend((function(), None))
        except Exception as error:
            outcome.extend((None, error))

    thread = threading.Thread(target=run, name="ostinato-transfer", daemon=True)
    thread.start()
    thread.join(seconds)
    if thread.is_alive():
        raise TransferTimeout(f"{what} took longer than {seconds:g} s")
    found, error = outcome
    if error is not None:
        raise error
    result: _Found = found
    return result
