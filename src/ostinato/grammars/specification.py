"""Refuses what must not reach the library: schemas that refer outside or in a circle, or that contain what it
would ignore, and excessive repetitions.

Runs in the grammar's own process. The library takes a reference to a file for "anything", which would
silently give wrong answers, and follows a circle forever.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from ostinato.text.errors import GrammarError
from ostinato.text.misread_expressions import misread
from ostinato.text.schema_keywords import first_unheld, held_part

from .limits import MAX_NESTING, MAX_REPETITIONS

_DATA = frozenset(("const", "enum", "default", "examples"))
"""What is below these is not a schema, unless they are names of properties."""
_NAMED = frozenset(("properties", "patternProperties", "$defs", "definitions", "dependentSchemas"))
"""Below these are names, and schemas below the names."""
_TAG_FIELDS = {
    "any_text": "excludes max_tokens max_chars",
    "any_tokens": "exclude_tokens max_tokens",
    "const_string": "value",
    "dispatch": "rules loop excludes",
    "exclude_token": "exclude_tokens",
    "grammar": "grammar",
    "json_schema": "json_schema style any_order max_whitespace_cnt excludes",
    "optional": "content",
    "or": "elements",
    "plus": "content",
    "qwen_xml_parameter": "json_schema",
    "regex": "pattern",
    "repeat": "min max content",
    "sequence": "elements",
    "star": "content",
    "structural_tag": "format",
    "tag": "begin content end",
    "tags_with_separator": "tags separator at_least_one stop_after_first",
    "token": "token",
    "token_dispatch": "rules loop exclude_tokens",
    "token_triggered_tags": "trigger_tokens tags exclude_tokens at_least_one stop_after_first",
    "triggered_tags": "triggers tags at_least_one stop_after_first excludes",
}
"""The fields of each part of a structural tag besides its type. The library ignores all others."""
_ESCAPES = frozenset("dDwWsSbBnrtfvaexucpPk")
"""Letters that the library knows after a backslash; some of them it refuses by name."""
_COUNT = re.compile(r"\{\s*(\d+)?\s*(,)?\s*(\d+)?\s*\}")


def checked(kind: str, text: str) -> tuple[str, str]:
    """Returns what the library is given: of loose schemas, the part that it can enforce.

    Raises GrammarError, naming what must not reach the library.
    """
    if kind == "loose_json":
        kind, text = "json", json.dumps(_loosened(_parsed(text)))
    elif kind == "structural_tag":
        tag = _parsed(text)
        if _loosen(tag):
            text = json.dumps(tag)
    if kind == "json":
        _check_schema(_parsed(text))
    elif kind == "structural_tag":
        _check_structural_tag(_parsed(text))
    elif kind == "regex":
        _check_expression(text)
    elif kind == "grammar":
        _check_repetitions(text, in_quotes=True)
    return kind, text


def _loosen(tag: Any) -> bool:
    """Loosens the schemas of a structural tag that need not be strict, in place; returns if any was."""
    found = False
    for part in _walk(tag, data=frozenset(("json_schema", "schema"))):
        if part.get("type") == "json_schema" and "strict" in part:
            found, strict = True, part.pop("strict")
            if not isinstance(strict, bool):
                raise GrammarError(f"strict of a json_schema must be true or false, not {str(strict)[:100]}")
            if not strict:
                part["json_schema"] = _loosened(part.get("json_schema"))
    return found


def _loosened(schema: Any) -> Any:
    """Returns the part of a schema that the library can enforce, which is found by recursion."""
    for _ in _walk(schema, data=frozenset()):
        pass  # it is not nested too deep
    return held_part(schema, schema)


def _parsed(text: str) -> Any:
    try:
        found = json.loads(text)
        json.dumps(found, ensure_ascii=False).encode()
        return found
    except UnicodeEncodeError:
        raise GrammarError("it contains half of a surrogate pair, which is not a character") from None
    except RecursionError:
        raise GrammarError(f"it is nested more than {MAX_NESTING} levels deep") from None
    except ValueError as error:
        raise GrammarError(f"it is not JSON: {error}") from None


def _check_structural_tag(tag: Any) -> None:
    """The schemas, expressions and grammars inside are checked like those of the other fields."""
    for inner in _walk(tag, data=frozenset(("json_schema", "schema"))):
        kind = inner.get("type")
        known = _TAG_FIELDS.get(kind) if isinstance(kind, str) else None
        if known is not None and (unknown := sorted(inner.keys() - {"type", *known.split()})):
            raise GrammarError(f"a part of type {kind!r} has no {unknown[0][:100]!r}")
        for name in ("json_schema", "schema"):
            if isinstance(inner.get(name), dict | bool):
                _check_schema(inner[name])
        if isinstance(inner.get("pattern"), str):
            _check_expression(inner["pattern"])
        if isinstance(inner.get("grammar"), str):
            _check_repetitions(inner["grammar"], in_quotes=True)


# -- schemas ---------------------------------------------------------------------------------------


def _check_schema(schema: Any) -> None:
    seen: set[str] = set()
    for inner in _walk(schema, data=_DATA):
        reference = inner.get("$ref")
        if isinstance(reference, str) and reference not in seen:
            seen.add(reference)
            _check_reference(schema, reference)
        if isinstance(inner.get("pattern"), str):
            _check_expression(inner["pattern"])
        if isinstance(names := inner.get("patternProperties"), dict):
            for expression in names:
                _check_expression(expression)
    if (reason := first_unheld(schema)) is not None:
        raise GrammarError(reason)


def _walk(value: Any, data: frozenset[str]) -> Iterator[dict[str, Any]]:
    """All objects in a value, except below the names in `data`."""
    level: list[tuple[Any, bool]] = [(value, False)]
    for _ in range(MAX_NESTING):
        below: list[tuple[Any, bool]] = []
        for each, is_named in level:
            if isinstance(each, list):
                below += [(inner, False) for inner in each]
            elif isinstance(each, dict) and is_named:
                below += [(inner, False) for inner in each.values()]
            elif isinstance(each, dict):
                yield each
                below += [(inner, name in _NAMED) for name, inner in each.items() if name not in data]
        if not below:
            return
        level = below
    raise GrammarError(f"it is nested more than {MAX_NESTING} levels deep")


def _check_reference(schema: Any, reference: str) -> None:
    if reference != "#" and not reference.startswith("#/"):
        raise GrammarError(
            f"$ref {reference[:200]!r} leads outside the schema: files and URLs are not read, "
            "only references that begin with '#' are followed"
        )
    passed = {reference}
    target = _target(schema, reference)
    while isinstance(target, dict) and isinstance(further := target.get("$ref"), str):
        if further in passed:
            raise GrammarError(f"$ref {further[:200]!r} refers to itself and to nothing else")
        passed.add(further)
        if not further.startswith("#"):
            return  # visited separately
        target = _target(schema, further)


def _target(schema: Any, reference: str) -> Any:
    found = schema
    for part in reference.split("/")[1:]:
        name = part.replace("~1", "/").replace("~0", "~")
        if isinstance(found, dict) and name in found:
            found = found[name]
        elif isinstance(found, list) and name.isdecimal() and int(name) < len(found):
            found = found[int(name)]
        else:
            raise GrammarError(f"$ref {reference[:200]!r}: the schema has no such place")
    return found


# -- expressions -----------------------------------------------------------------------------------


def _check_expression(text: str) -> None:
    r"""The library reads \A and \Z as letters, and other escapes that it does not know."""
    for escape in re.findall(r"\\(.)", text, re.DOTALL):
        if escape.isascii() and escape.isalpha() and escape not in _ESCAPES:
            raise GrammarError(f"\\{escape} is not supported: expressions always match the whole text")
    if (reason := misread(text)) is not None:
        raise GrammarError(reason)
    _check_repetitions(text, in_quotes=False)


def _check_repetitions(text: str, *, in_quotes: bool) -> None:
    """Check an expression, or a grammar, whose literals are in quotes."""
    inside = [1]  # for each open bracket: the maximum repetitions of anything in it so far
    last, at = 1, 0  # repetitions of what has just ended; a following count multiplies them
    while at < len(text):
        character = text[at]
        if character == "\\":
            at, last = at + 2, 1
            continue
        if character == "[" or (character == '"' and in_quotes):
            at, last = _end_of(text, at, "]" if character == "[" else '"'), 1
            continue
        if character == "(":
            if len(inside) > MAX_NESTING:
                raise GrammarError(f"its brackets are nested more than {MAX_NESTING} levels deep")
            inside.append(1)
        elif character == ")" and len(inside) > 1:
            last = inside.pop()
            inside[-1] = max(inside[-1], last)
        elif found := _COUNT.match(text, at):
            last *= max(1, *(int(digits[:9]) for digits in (found[1], found[3]) if digits), 1)
            if last > MAX_REPETITIONS:
                raise GrammarError(
                    f"it repeats a part up to {last:,} times; at most {MAX_REPETITIONS:,} are allowed"
                )
            inside[-1] = max(inside[-1], last)
            at = found.end()
            continue
        elif not (character in "*+?" or character.isspace()):
            last = 1
        at += 1


def _end_of(text: str, begin: int, closing: str) -> int:
    """The index after a character class or a literal."""
    at = begin + 1
    while at < len(text) and text[at] != closing:
        at += 2 if text[at] == "\\" else 1
    return at + 1
