"""Finds what the grammar library ignores in a JSON schema: answers would not follow it."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from .misread_expressions import misread

_PARTS_OF_PATTERNS = re.compile(
    r"(?P<lookahead>\(\?[=!])|\[\^(?:\\.|[^\]\\])*\]|(?P<raw>\\[\\\"nrtfv]|\")|\\.", re.DOTALL
)
"""Negated character classes are skipped as wholes."""
_BEGINNING = re.compile(r"\^((?:[\w-](?![*?{|]))+)(?!.*\|)", re.ASCII | re.DOTALL)
"""The letters at the beginning of an expression without alternatives."""
_UNKNOWN = frozenset(
    ("not", "if", "contains", "dependentRequired", "dependentSchemas", "dependencies", "uniqueItems")
)
_WHOLE = ("$ref", "anyOf", "oneOf", "allOf")
"""If one of these is present, the library reads it and ignores everything beside it."""
_OF_VALUES = frozenset(
    ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf", "minLength", "maxLength")
) | {"pattern", "format", "minItems", "maxItems", "required", "minProperties", "maxProperties"}
_OF_PARTS = frozenset(
    ("properties", "patternProperties", "propertyNames", "additionalProperties", "unevaluatedProperties")
) | {"items", "prefixItems", "unevaluatedItems"}
_NAMED = frozenset(("properties", "patternProperties", "$defs", "definitions"))
_OTHERS = frozenset(("additionalProperties", "unevaluatedProperties", "unevaluatedItems"))
_SCHEMAS = frozenset(("items", "prefixItems", "propertyNames")) | _OTHERS | {*_WHOLE[1:]}
_BOUNDS = frozenset(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"))
FORMATS = frozenset(
    ("date", "time", "date-time", "duration", "email", "uuid", "ipv4", "ipv6", "hostname")
) | {
    *("uri", "uri-reference", "uri-template", "json-pointer", "relative-json-pointer"),
}
"""Formats that the library knows; all others are annotations."""
_TYPES: Mapping[str, Callable[[Any], bool]] = {
    "null": lambda value: value is None,
    "boolean": lambda value: isinstance(value, bool),
    "integer": lambda value: (
        isinstance(value, int | float) and not isinstance(value, bool) and value % 1 == 0
    ),
    "number": lambda value: isinstance(value, int | float) and not isinstance(value, bool),
    "string": lambda value: isinstance(value, str),
    "array": lambda value: isinstance(value, list),
    "object": lambda value: isinstance(value, dict),
}
_TYPED = _OF_PARTS | {*_WHOLE, "type", "enum", "const"}
_HOLDING = _TYPED | _OF_VALUES | _UNKNOWN
"""Keywords that constrain a value; all others, such as titles, are annotations."""


def first_unheld(schema: Any) -> str | None:
    """The first keyword in a schema that the library ignores, and why; None if there is none."""
    level = [(schema, False)]
    while level:
        below = []
        for each, is_name in level:
            if not isinstance(each, dict):
                continue
            for name, reason in _unheld(each, schema, is_name=is_name).items():
                return f"{name} {reason}"
            for name in each:
                below += [(inner, name == "propertyNames") for inner in _schemas_below(each, name)]
        level = below
    return None


def held_part(schema: Any, root: Any, *, is_name: bool = False) -> Any:
    """A schema without what the library ignores; for a format that is desired but not guaranteed.

    `is_name`: it constrains names of properties, which are strings.
    """
    if not isinstance(schema, dict):
        return schema
    ignored = _unheld(schema, root, is_name=is_name)
    return {name: _held_below(name, inner, root) for name, inner in schema.items() if name not in ignored}


def _held_below(name: str, inner: Any, root: Any) -> Any:
    if name in _NAMED and isinstance(inner, dict):
        return {key: held_part(value, root) for key, value in inner.items()}
    if name not in _SCHEMAS:
        return inner
    if isinstance(inner, list):
        return [held_part(each, root) for each in inner]
    return held_part(inner, root, is_name=name == "propertyNames")


def _schemas_below(schema: Mapping[str, Any], name: str) -> list[Any]:
    inner = schema[name]
    if name in _NAMED:
        return list(inner.values()) if isinstance(inner, dict) else []
    if name in _SCHEMAS:
        return inner if isinstance(inner, list) else [inner]
    return []


def _unheld(schema: Mapping[str, Any], root: Any, *, is_name: bool) -> dict[str, str]:
    """Keywords of one (sub)schema that the library ignores, each with the reason."""
    found = {name: "cannot be enforced" for name in _UNKNOWN & schema.keys() if schema[name] is not False}
    found.update(_beside_whole(schema, root))
    if not is_name and not schema.keys() & _TYPED:
        found.update(dict.fromkeys(schema.keys() & _OF_VALUES, "is not enforced without a type"))
    if isinstance(schema.get("pattern"), str) and (why_not := _unheld_pattern(schema["pattern"])):
        found["pattern"] = why_not
    if "pattern" in schema:
        beside = {"minLength", "maxLength"} & schema.keys()
        found.update(dict.fromkeys(beside, "is not enforced beside a pattern, which can say the same"))
    if isinstance(form := schema.get("format"), str) and form in FORMATS:
        beside = {"minLength", "maxLength", "pattern"} & schema.keys()
        found.update(dict.fromkeys(beside, f"is not enforced beside format {form!r}"))
    if "multipleOf" in schema and not _is_integral(schema):
        found["multipleOf"] = "is enforced for integers only"
    elif "multipleOf" in schema and schema.keys() & _BOUNDS:
        found["multipleOf"] = "is not enforced beside bounds"
    found.update(_beside_values(schema))
    return dict(_of_properties(schema)) | found


def _of_properties(schema: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """What the library ignores about an object's properties and their names."""
    known = schema.get("properties")
    known = known if isinstance(known, dict) else {}
    if isinstance(named := schema.get("required"), list):
        missing = [name for name in named if not isinstance(name, str) or name not in known]
        if missing:
            yield "required", f"has {str(missing[0])[:100]!r}, which is not among the properties"
    if isinstance(patterns := schema.get("patternProperties"), dict) and patterns:
        if why_not := _unheld_patterns(patterns, known, schema):
            yield "patternProperties", why_not
        if "propertyNames" in schema:
            yield "propertyNames", "is not enforced beside patternProperties"
    for name in ("additionalProperties", "unevaluatedProperties", "minProperties", "maxProperties"):
        if "propertyNames" in schema and name in schema and (known or schema[name] is False):
            yield name, "is not enforced beside propertyNames"
    if any(not _is_name(name, schema.get("propertyNames")) for name in known):
        yield "propertyNames", "is not enforced for listed properties"


def _unheld_patterns(
    patterns: Mapping[str, Any], known: Mapping[str, Any], schema: Mapping[str, Any]
) -> str | None:
    """If two rules apply to a name, the library knows only one of them."""
    for pattern in patterns:
        if (why_not := _unheld_pattern(pattern)) is not None:
            return f"{pattern[:100]!r}: a name {why_not}"
    others = (schema.get(name, False) for name in ("additionalProperties", "unevaluatedProperties"))
    if known and any(each is not False for each in others):
        return "is not enforced beside properties if others are allowed"
    if any(_may_match(pattern, name) for pattern in patterns for name in known):
        return "is not enforced for listed properties"
    if any(_may_overlap(*pair) for pair in itertools.combinations(patterns, 2)):
        return "is not enforced if a name may match two: begin them with ^ and different letters"
    return None


def _may_match(pattern: str, name: str) -> bool:
    try:
        return re.search(pattern, name) is not None
    except re.error:  # the library's syntax differs from Python's
        return True


def _may_overlap(one: str, other: str) -> bool:
    """False only if they begin with different letters."""
    begin, beginning = (found[1] if (found := _BEGINNING.match(each)) else "" for each in (one, other))
    return begin.startswith(beginning) or beginning.startswith(begin)


def _is_name(name: str, rule: Any) -> bool:
    """Whether the name certainly follows the rule for names."""
    if not isinstance(rule, dict):
        return rule is None
    checks = {
        "type": lambda kind: kind == "string",
        "const": lambda value: name == value,
        "enum": lambda values: name in values,
        "minLength": lambda least: len(name) >= least,
        "maxLength": lambda most: len(name) <= most,
        "pattern": lambda pattern: re.search(pattern, name) is not None,
    }
    try:
        return all(keyword in checks and checks[keyword](rule[keyword]) for keyword in rule.keys() & _HOLDING)
    except (TypeError, re.error):  # the library reports what is wrong
        return False


def _beside_values(schema: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """If values are listed, the library reads them and ignores everything beside them."""
    listed = next((name for name in ("const", "enum") if name in schema), None)
    if listed is None:
        return
    for name in schema.keys() & (_OF_VALUES - {"format"} | _OF_PARTS):
        yield name, f"is not enforced beside {listed}"
    kinds = schema.get("type")
    checks = [
        _TYPES.get(kind) for kind in (kinds if isinstance(kinds, list) else [kinds]) if isinstance(kind, str)
    ]
    values = schema[listed] if listed == "enum" else [schema[listed]]
    if checks and all(checks) and isinstance(values, list):
        for value in values:
            if not any(check(value) for check in checks if check is not None):
                yield listed, f"has {str(value)[:100]!r}, which is not of the type"


def _beside_whole(schema: Mapping[str, Any], root: Any) -> Iterator[tuple[str, str]]:
    whole = next((name for name in _WHOLE if name in schema), None)
    if whole is None or schema.keys() & {"const", "enum"}:
        return
    alternatives = [schema] if whole == "$ref" else schema[whole]
    if not isinstance(alternatives, list):
        return  # the library reports what is wrong
    if (
        whole == "allOf"
        and sum(isinstance(each, dict) and bool(each.keys() & _HOLDING) for each in alternatives) > 1
    ):
        yield whole, "of several schemas cannot be enforced: write them as one"
    for name in sorted(schema.keys() & _HOLDING - {whole}):
        if name != "type" or any(_type_of(each, root) != schema["type"] for each in alternatives):
            yield name, f"is not enforced beside {whole}"


def _type_of(schema: Any, root: Any) -> Any:
    """The type of a schema, or of the one it refers to."""
    for _ in range(16):
        if not isinstance(schema, dict) or not isinstance(reference := schema.get("$ref"), str):
            break
        schema = root
        for part in reference.split("/")[1:]:
            name = part.replace("~1", "/").replace("~0", "~")
            schema = schema.get(name) if isinstance(schema, dict) else None
    return schema.get("type") if isinstance(schema, dict) else None


def _is_integral(schema: Mapping[str, Any]) -> bool:
    kinds, factor = schema.get("type"), schema["multipleOf"]
    listed = kinds if isinstance(kinds, list) else [kinds]
    return (
        "integer" in listed and "number" not in listed and isinstance(factor, int | float) and factor % 1 == 0
    )


def _unheld_pattern(pattern: str) -> str | None:
    """The library ignores lookaheads, and writes quotes and backslashes in a way that JSON cannot contain."""
    for part in _PARTS_OF_PATTERNS.finditer(pattern):
        if part["lookahead"]:
            return "with a lookahead cannot be enforced"
        if part["raw"]:
            return f"with {part['raw']} cannot be enforced inside JSON"
    reason = misread(pattern)
    return None if reason is None else f"is not enforced: {reason}"
