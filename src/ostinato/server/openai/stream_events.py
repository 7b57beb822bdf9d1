"""Server-sent events: how what a generation brings is put on the line."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Protocol

from .errors import ApiError

DONE = b"data: [DONE]\n\n"


def event(json: bytes, name: str | None = None) -> bytes:
    """One event."""
    named = b"" if name is None else b"event: " + name.encode() + b"\n"
    return named + b"data: " + json + b"\n\n"


class Writer(Protocol):
    """Writes the answer of one request, at once or in events."""

    @property
    def end(self) -> bytes:
        """What closes a stream that came to its end."""

    def whole(self) -> bytes:
        """The answer, when the generation is finished."""

    def events(self) -> list[bytes]:
        """What has come since the last time; called for the last time when the generation is finished."""

    def failure(self, error: ApiError) -> bytes:
        """The last event of a stream that went wrong."""


class ChunkEvents(ABC):
    """A writer whose events are bare JSON."""

    end = DONE

    @abstractmethod
    def chunks(self) -> list[bytes]:
        """The bodies of the events."""

    def events(self) -> list[bytes]:
        """What has come since the last time."""
        return [event(chunk) for chunk in self.chunks()]

    def failure(self, error: ApiError) -> bytes:
        """The error in its usual shape."""
        return event(error.body)
