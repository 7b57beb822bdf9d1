"""What a function's code mentions and does, read from its bytes: `dis` takes a hundred times as long."""

import functools
import opcode
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_NAMED = frozenset(opcode.hasname)
_EXTENDED = opcode.opmap["EXTENDED_ARG"]
_SHIFTS = {opcode.opmap["LOAD_GLOBAL"]: 1}
"""Instructions whose argument has flags below the number of the name."""
if sys.version_info >= (3, 12):
    _SHIFTS |= {opcode.opmap["LOAD_ATTR"]: 1, opcode.opmap["LOAD_SUPER_ATTR"]: 2}


@functools.cache
def _by_instruction(code: types.CodeType) -> dict[int, dict[str, None]]:
    """Names by the instruction that has them, functions defined inside included."""
    found: dict[int, dict[str, None]] = {}
    raw, names, high = code.co_code, code.co_names, 0
    for op, arg in zip(raw[::2], raw[1::2], strict=True):
        if op == _EXTENDED:
            high = (high | arg) << 8
            continue
        if op in _NAMED:
            found.setdefault(op, {})[names[(high | arg) >> _SHIFTS.get(op, 0)]] = None
        high = 0
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            for op, inside in _by_instruction(constant).items():
                found.setdefault(op, {}).update(inside)
    return found


@functools.cache
def names_in(code: types.CodeType, kinds: tuple[str, ...]) -> tuple[str, ...]:
    """Names in instructions of these kinds of a function's code, functions defined inside it included."""
    by_instruction = _by_instruction(code)
    found: dict[str, None] = {}
    for kind in kinds:
        found |= by_instruction.get(opcode.opmap.get(kind, -1), {})
    return tuple(found)


@functools.cache
def mentioned(code: types.CodeType) -> frozenset[str]:
    """Names and texts in a function's code, functions defined inside it included."""
    found = {*code.co_names, *(constant for constant in code.co_consts if isinstance(constant, str))}
    inside = (mentioned(constant) for constant in code.co_consts if isinstance(constant, types.CodeType))
    return frozenset(found.union(*inside))


class Ran:
    """Which code ran: no other code runs as long as all that it read is the same."""

    def __init__(self) -> None:
        self._codes: set[types.CodeType] = set()
        self._is_known = True

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Around a run."""
        if sys.getprofile() is not None:  # somebody else looks, and cannot be interrupted
            self._is_known = False
            yield
            return
        add = self._codes.add

        def note(frame: types.FrameType, event: str, _: Any) -> None:
            if event == "call":
                add(frame.f_code)

        sys.setprofile(note)
        try:
            yield
        finally:
            sys.setprofile(None)

    @property
    def codes(self) -> set[types.CodeType] | None:
        """All of it; None if that is not known."""
        return self._codes if self._is_known else None
