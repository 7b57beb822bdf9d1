"""One call as models write it, {"name": ..., "arguments": {...}}, read while it arrives."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass

_HEADER = re.compile(
    r"""\s*\{\s*(?:"type"\s*:\s*"function"\s*,\s*)?"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"""
    r""""(?:arguments|parameters)"\s*:\s*(?=\{)"""
)


@dataclass(frozen=True)
class CallPiece:
    """What a piece of text added to a call; the first piece of each call has its name."""

    index: int
    name: str | None
    arguments: str


class CallReader:
    """Gives out name and arguments as soon as they are certain.

    In the usual order of keys the arguments stream character by character; any other order is read when the
    object is complete.
    """

    def __init__(self, index: int, allowed_names: frozenset[str] | None = None) -> None:
        """`allowed_names`: an object with another name is no call; None allows all."""
        self.raw = ""
        """All that was fed."""
        self.end: int | None = None
        """Where the object ends in `raw`, once it has."""
        self.is_call = False
        """Whether a name was found."""
        self._index = index
        self._allowed = allowed_names
        self._scanned = 0
        self._depth = 0
        self._in_string = False
        self._is_broken = False
        self._escaped = False
        self._inner_ends: list[int] = []
        self._sent = 0
        self._streams = False

    def feed(self, text: str) -> list[CallPiece]:
        """Read on."""
        self.raw += text
        self._scan()
        pieces: list[CallPiece] = []
        if not self.is_call and (header := _HEADER.match(self.raw)) is not None:
            name = _unquoted(header[1])
            if self._is_allowed(name):
                self.is_call = self._streams = True
                self._sent = header.end()
                pieces.append(CallPiece(self._index, name, ""))
        if self._streams:
            end = next((end for end in self._inner_ends if end > self._sent), len(self.raw))
            if end > self._sent and not self._is_past_arguments:
                pieces.append(CallPiece(self._index, None, self.raw[self._sent : end]))
                self._sent = end
        elif self.end is not None and not self.is_call:
            pieces += self._whole()
        return pieces

    @property
    def is_in_string(self) -> bool:
        """Whether what comes next belongs to a string of the object; of one with a line break in it, which
        JSON does not have, nobody knows where it ends."""
        return self._depth > 0 and self._in_string and not self._is_broken

    @property
    def _is_past_arguments(self) -> bool:
        return self._sent in self._inner_ends

    def _is_allowed(self, name: object) -> bool:
        return isinstance(name, str) and (self._allowed is None or name in self._allowed)

    def _whole(self) -> list[CallPiece]:
        try:
            call = json.loads(self.raw[: self.end])
        except (ValueError, RecursionError):
            return []
        arguments = call.get("arguments", call.get("parameters", {}))
        if not self._is_allowed(call.get("name")):
            return []
        self.is_call = True
        text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        return [CallPiece(self._index, call["name"], text)]

    def _scan(self) -> None:
        """Follow braces outside strings; note where objects of depth 2 end, and the whole."""
        while self._scanned < len(self.raw) and self.end is None:
            character = self.raw[self._scanned]
            self._scanned += 1
            if self._in_string:
                self._is_broken |= character == "\n"
                if self._escaped:
                    self._escaped = False
                elif character == "\\":
                    self._escaped = True
                elif character == '"':
                    self._in_string = False
            elif character == '"':
                self._in_string, self._is_broken = True, False
            elif character == "{":
                self._depth += 1
            elif character == "}":
                self._depth -= 1
                if self._depth == 1:
                    self._inner_ends.append(self._scanned)
                elif self._depth <= 0:
                    self.end = self._scanned


def _unquoted(text: str) -> str | None:
    try:
        name: str = json.loads(text, strict=False)
    except ValueError:  # an escape that JSON does not have
        return None
    return name
