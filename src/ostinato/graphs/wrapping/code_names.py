"""What a function's code mentions and does, read from its bytes: `dis` takes a hundred times as long."""

import functools
import opcode
import os
import sys
import sysconfig
import types
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

_NAMED = frozenset(opcode.hasname)
_EXTENDED = opcode.opmap["EXTENDED_ARG"]
_IN_PLACE = 13
"""The first of the numbers that say `+=` and the like."""
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


@functools.cache
def named_in(code: types.CodeType) -> frozenset[str]:
    """These, and variables of functions around it."""
    inside = (named_in(constant) for constant in code.co_consts if isinstance(constant, types.CodeType))
    return frozenset({*mentioned(code), *code.co_freevars, *code.co_cellvars}.union(*inside))


_OF_TORCH, _OURS = str(Path(torch.__file__).parent), str(Path(__file__).parent.parent)
_OF_PYTHON = sysconfig.get_path("stdlib")


def is_read_from(code: types.CodeType) -> bool:
    """Returns whether it is anybody's but torch's, Python's and ours."""
    file = code.co_filename
    is_pythons = file.startswith(_OF_PYTHON) and "site-packages" not in file
    return not (is_pythons or file.startswith((_OF_TORCH, _OURS, "<frozen")))


_LOADS = frozenset(name for name in opcode.opmap if name.startswith("LOAD_")) - {"LOAD_CLOSURE"}
_OF_ATTRIBUTES = frozenset(("LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER_ATTR", "STORE_ATTR"))
_FILLS = frozenset(("append", "appendleft", "extend", "add", "insert", "update", "clear"))
"""Methods that put something into a container and look at nothing in it."""


@functools.cache
def _instructions(code: types.CodeType) -> list[tuple[str, Any]]:
    """Instructions with their names, or with their numbers."""
    found: list[tuple[str, Any]] = []
    raw, high = code.co_code, 0
    for op, arg in zip(raw[::2], raw[1::2], strict=True):
        if op == _EXTENDED:
            high = (high | arg) << 8
            continue
        given: Any = high | arg
        name, high = opcode.opname[op], 0
        if name in ("CACHE", "PRECALL"):
            continue
        if op in _NAMED:
            given = code.co_names[given >> _SHIFTS.get(op, 0)]
        elif op in opcode.hasfree:
            given = _local_names(code)[given]
        elif op in opcode.hasconst:
            given = code.co_consts[given]
        found.append((name, given))
    return found


@functools.cache
def _local_names(code: types.CodeType) -> tuple[str, ...]:
    """Of variables, as instructions for those of closures number them."""
    cells = tuple(name for name in code.co_cellvars if name not in code.co_varnames)
    return code.co_varnames + cells + code.co_freevars


@functools.cache
def looks_at(code: types.CodeType, name: str, *, attribute: bool, variable: bool) -> bool:
    """Returns whether a function's code looks at an attribute or a variable of this name. `self.n += 1` and
    `self.seen.append(x)` do not: there is a change in place for every mention."""
    kinds = {"attribute": attribute, "variable": variable}
    if any(
        looks_at(constant, name, **kinds)
        for constant in code.co_consts
        if isinstance(constant, types.CodeType)
    ):
        return True
    steps = _instructions(code)
    loads = changes = 0
    for number, (op, given) in enumerate(steps):
        if given != name or not isinstance(given, str):
            continue
        if op != "LOAD_CONST" and not (attribute if op in _OF_ATTRIBUTES else variable):
            continue
        if op in _LOADS:
            loads += 1
            changes += _is_filled(steps[number + 1 :][:4]) or _is_counted(steps[number : number + 10], name)
        elif op.startswith("STORE_"):
            changes += _is_changed_in_place(steps[max(0, number - 2) : number])
    return loads > changes


@functools.cache
def accumulates(code: types.CodeType, name: str) -> bool:
    """Returns whether a function's code adds something to an attribute or a variable of this name."""
    steps = _instructions(code)
    inside = [each for each in code.co_consts if isinstance(each, types.CodeType)]
    return any(accumulates(each, name) for each in inside) or any(
        given == name
        and (
            (op.startswith("STORE_") and _is_changed_in_place(steps[max(0, at - 2) : at]))
            or (op in _LOADS and _is_counted(steps[at : at + 10], name))
            or (op in _LOADS and [o for o, _ in steps[at + 2 : at + 5]] == ["COPY", "COPY", "BINARY_SUBSCR"])
        )
        for at, (op, given) in enumerate(steps)
    )


def _is_changed_in_place(steps: list[tuple[str, Any]]) -> bool:
    """`x.n += ...` or `n += ...`, whose result is stored next."""
    if steps and steps[-1][0] == "SWAP":
        steps = steps[:-1]
    return bool(steps) and steps[-1][0] == "BINARY_OP" and bool(steps[-1][1] >= _IN_PLACE)


def _is_counted(steps: list[tuple[str, Any]], name: str) -> bool:
    """`x.n = x.n + 1`, `n = n + 1` or `x.n = getattr(x, "n", 0) + 1`, from where it is loaded."""
    ahead = steps[3:] if [op for op, _ in steps[:3]] == ["LOAD_CONST", "LOAD_CONST", "CALL"] else steps[1:]
    ops = [op for op, _ in ahead]
    if len(ops) < 3 or ops[0] not in _LOADS or ops[1] != "BINARY_OP" or ahead[1][1] >= _IN_PLACE:
        return False
    op, given = next((step for step in ahead[2:] if step[0] not in _LOADS), ("", None))
    return op.startswith("STORE_") and given == name


def _is_filled(steps: list[tuple[str, Any]]) -> bool:
    """`x.append(...)`, `x[key].append(...)`, `x[key] = ...` or `x[key] += ...`, of which the first part is
    just loaded."""
    if not steps:
        return False
    op, given = steps[0]
    if op in ("LOAD_METHOD", "LOAD_ATTR") and given in _FILLS:
        return True
    ops = [op for op, _ in steps[1:4]]
    if op in _LOADS and ops[:1] == ["STORE_SUBSCR"]:
        return True
    if op in _LOADS and ops[:1] == ["BINARY_SUBSCR"] and len(steps) > 2:
        return steps[2][0] in ("LOAD_METHOD", "LOAD_ATTR") and steps[2][1] in _FILLS
    return ops == ["COPY", "COPY", "BINARY_SUBSCR"]


_VARIABLES = type(os.environ)
_LOOKS_UP, _LISTS, _COUNTS = (
    getattr(_VARIABLES, method).__code__ for method in ("__getitem__", "__iter__", "__len__")
)


class Ran:
    """Which code ran, and which environment variables it asked for: no other code runs, and no others are
    asked for, as long as all that it read is the same."""

    def __init__(self) -> None:
        self._codes: set[types.CodeType] = set()
        self._environment: set[Any] = set()
        self._is_known = True
        self._lists_environment = False

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
                code = frame.f_code
                add(code)
                if code is _LOOKS_UP or code is _LISTS or code is _COUNTS:
                    self._note_variable(frame)

        sys.setprofile(note)
        try:
            yield
        finally:
            sys.setprofile(None)

    def _note_variable(self, frame: types.FrameType) -> None:
        """Something of `os.environ` is asked for, by code that counts or by torch's or Python's own."""
        variables, caller = frame.f_locals["self"], frame.f_back
        while caller is not None and caller.f_code.co_filename.startswith("<frozen"):
            caller = caller.f_back
        is_it = getattr(variables, "_data", None) is environment_now()
        if not is_it or caller is None or not is_read_from(caller.f_code):
            return
        if frame.f_code is not _LOOKS_UP:
            self._lists_environment = True
            return
        with suppress(TypeError):  # as it raises itself
            self._environment.add(variables.encodekey(frame.f_locals["key"]))

    @property
    def codes(self) -> set[types.CodeType] | None:
        """All of it; None if that is not known."""
        return self._codes if self._is_known else None

    @property
    def environment(self) -> set[Any] | None:
        """The environment variables, as keys of `environment_now()`; None if it may be any."""
        return self._environment if self._is_known and not self._lists_environment else None


def environment_now() -> dict[Any, Any]:
    """The dictionary behind `os.environ`, whose entries stay the same objects until they are set."""
    found: dict[Any, Any] = vars(os.environ)["_data"]
    return found
