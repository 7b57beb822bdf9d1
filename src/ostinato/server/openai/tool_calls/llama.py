"""Llama 3: the whole answer is {"name": ..., "parameters": {...}}, or several of them with ; between."""

from __future__ import annotations

from .call_reader import CallReader
from .parser import Parsed

_TAG = "<|python_tag|>"


class LlamaToolCalls:
    """One answer. An object that names no tool is content, and so is everything behind text."""

    def __init__(self, tool_names: frozenset[str]) -> None:
        self.num_calls = 0
        self._names = tool_names
        self._buffer = ""
        self._call: CallReader | None = None
        self._is_text = False

    def push(self, text: str) -> Parsed:
        """Take in a piece of the answer."""
        parsed = Parsed()
        self._buffer += text
        while self._buffer and (self._inside(parsed) if self._call is not None else self._outside(parsed)):
            pass
        return parsed

    def finish(self) -> Parsed:
        """What is held back is content, unless a call has begun."""
        parsed = Parsed()
        if self._call is not None and not self._call.is_call:
            parsed.content = self._call.raw
        elif self._call is None and (self._buffer.strip() or not self.num_calls):
            parsed.content = self._buffer
        self._buffer, self._call = "", None
        return parsed

    def _outside(self, parsed: Parsed) -> bool:
        if self._is_text:
            parsed.content, self._buffer = parsed.content + self._buffer, ""
            return False
        between = " \n\t;" if self.num_calls else " \n\t"
        ahead = self._buffer.lstrip(between)
        if _TAG.startswith(ahead[: len(_TAG)]) and len(ahead) < len(_TAG):
            return False  # blank so far, or the beginning of the tag
        ahead = ahead.removeprefix(_TAG).lstrip(between)
        if not ahead:
            return False
        if ahead.startswith("{"):
            self._buffer, self._call = ahead, CallReader(self.num_calls, self._names)
        else:
            self._is_text = True
        return True

    def _inside(self, parsed: Parsed) -> bool:
        call = self._call
        assert call is not None
        was_call = call.is_call
        parsed.calls += call.feed(self._buffer)
        self.num_calls += call.is_call and not was_call
        self._buffer = ""
        if call.end is None:
            return False
        self._call, self._buffer = None, call.raw[call.end :]
        if not call.is_call:
            self._is_text, self._buffer = True, call.raw
        return True
