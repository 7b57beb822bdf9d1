"""Qwen, Hermes: each call as JSON between <tool_call> and </tool_call>, after or between text."""

from __future__ import annotations

from .call_reader import CallReader
from .parser import Parsed, held_back

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"


class QwenToolCalls:
    """One answer. Blank space beside calls is layout, not content."""

    def __init__(self) -> None:
        self.num_calls = 0
        self._buffer = ""
        self._space = ""
        """Blank space that is content only if text follows."""
        self._follows_call = False
        self._call: CallReader | None = None

    def push(self, text: str) -> Parsed:
        """Take in a piece of the answer."""
        parsed = Parsed()
        self._buffer += text
        while self._inside(parsed) if self._call is not None else self._outside(parsed):
            pass
        return parsed

    def finish(self) -> Parsed:
        """What is held back is content, unless it belongs to a call that has begun."""
        parsed = Parsed()
        rest, self._buffer = self._buffer, ""
        call, self._call = self._call, None
        if call is None:
            tail = self._space + rest
            parsed.content = tail.lstrip() if self._follows_call else tail
            return parsed
        was_call = call.is_call
        parsed.calls = call.feed(rest)
        self.num_calls += call.is_call and not was_call
        if not call.is_call:
            parsed.content = self._space + _OPEN + call.raw
        return parsed

    def _outside(self, parsed: Parsed) -> bool:
        before, tag, behind = self._buffer.partition(_OPEN)
        keep = 0 if tag else held_back(before, _OPEN)
        self._content(parsed, before[: len(before) - keep])
        if not tag:
            self._buffer = before[len(before) - keep :]
            return False
        self._buffer, self._call = behind, CallReader(self.num_calls)
        return True

    def _content(self, parsed: Parsed, text: str) -> None:
        text = self._space + text
        if self._follows_call:
            text = text.lstrip()
        solid = text.rstrip()
        if solid:
            parsed.content += solid
            self._follows_call = False
        self._space = text[len(solid) :]

    def _inside(self, parsed: Parsed) -> bool:
        call = self._call
        assert call is not None
        before, tag, behind = self._buffer.partition(_CLOSE)
        keep = 0 if tag else held_back(before, _CLOSE)
        was_call = call.is_call
        parsed.calls += call.feed(before[: len(before) - keep])
        is_quoted = bool(tag) and call.is_in_string
        if is_quoted:
            parsed.calls += call.feed(tag)
        self.num_calls += call.is_call and not was_call
        self._buffer = behind if tag else before[len(before) - keep :]
        if not tag or is_quoted:
            return is_quoted
        if call.is_call:
            self._space, self._follows_call = "", True
        else:
            # Not a call after all: the client gets to see what the model wrote.
            self._content(parsed, _OPEN + call.raw + _CLOSE)
        self._call = None
        return True
