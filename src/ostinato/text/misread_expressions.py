"""Finds what the grammar library misreads in a regular expression: answers would match something else."""

from __future__ import annotations

import re

_NUMBER = re.compile(r"\\(?:x(?:[0-9a-fA-F]{3}|\{)|0[0-9])|\\.", re.DOTALL)
"""The library reads all digits after \\x as one number, braces as a count, and no digits after \\0."""
_GROUP = re.compile(r"\((?:\?(?::|P?<\w+>))?")
_TIMES = re.compile(r"[*+?]|\{[\s\d,]*\}")


def misread(expression: str) -> str | None:
    """Why the library would enforce another expression; None if it would not."""
    for escape in _NUMBER.findall(expression):
        if len(escape) > 2:
            return f"{escape} is not read as written: write \\u and four digits"
    return _misplaced_anchor(expression)


def _misplaced_anchor(text: str) -> str | None:
    """The library ignores ^ and $. After the beginning and before the end, that allows texts that they do
    not."""
    groups: list[tuple[bool, bool]] = []  # (is_begin, is_end) of the enclosing groups
    is_begin = begins = True  # whether the innermost group begins the text; whether this place does
    is_end = ends = False  # whether an alternative of the group has ended in $; whether this one has
    at = 0
    while at < len(text):
        character = text[at]
        if character == "$":
            ends = True
        elif character == "|":
            is_end, begins, ends = is_end or ends, is_begin, False
        elif character == ")" and groups:
            begins, ends = False, is_end or ends
            is_begin, is_end = groups.pop()
        elif times := _TIMES.match(text, at):
            at = times.end()
            continue
        elif ends:
            return "$ before the end of an expression cannot be enforced"
        elif character == "^" and not begins:
            return "^ after the beginning of an expression cannot be enforced"
        elif group := _GROUP.match(text, at):
            groups.append((is_begin, is_end))
            is_begin, is_end, at = begins, False, group.end()
            continue
        else:
            begins = character == "^"
            at = _behind(text, at)
            continue
        at += 1
    return None


def _behind(text: str, at: int) -> int:
    """The index after a character, an escape or a character class."""
    if text[at] == "\\":
        return at + 2
    if text[at] == "[":
        at += 1
        while at < len(text) and text[at] != "]":
            at += 2 if text[at] == "\\" else 1
    return at + 1
