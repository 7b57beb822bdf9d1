"""The names that a function's code mentions."""

import dis
import functools
import types


@functools.cache
def names_in(code: types.CodeType, kinds: tuple[str, ...]) -> tuple[str, ...]:
    """Names in instructions of these kinds of a function's code, functions defined inside it included."""
    found = [step.argval for step in dis.get_instructions(code) if step.opname in kinds]
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            found += names_in(constant, kinds)
    return tuple(dict.fromkeys(found))


@functools.cache
def mentioned(code: types.CodeType) -> frozenset[str]:
    """Names and texts in a function's code, functions defined inside it included."""
    found = {*code.co_names, *(constant for constant in code.co_consts if isinstance(constant, str))}
    inside = (mentioned(constant) for constant in code.co_consts if isinstance(constant, types.CodeType))
    return frozenset(found.union(*inside))
