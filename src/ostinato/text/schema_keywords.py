"""What of a JSON schema the grammar library reads over: answers would not be held to it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from .misread_expressions import misread

_PARTS_OF_PATTERNS = re.compile(
    r"(?P<lookahead>\(\?[=!])|\[\^(?:\\.|[^\]\\])*\]|(?P<raw>\\[\\\"nrtfv]|\")|\\.", re.DOTALL
)
"""Classes of what may not come are passed over whole."""
_UNKNOWN = frozenset(
    ("not", "if", "contains", "dependentRequired", "dependentSchemas", "dependencies", "uniqueItems")
)
_WHOLE = ("$ref", "anyOf", "oneOf", "allOf")
"""Where one of these stands, the library reads it and nothing beside it."""
_OF_VALUES = frozenset(
    ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf", "minLength", "maxLength")
) | {"pattern", "format", "minItems", "maxItems", "required", "minProperties", "maxProperties"}
_OF_PARTS = frozenset(
    ("properties", "patternProperties", "propertyNames", "additionalProperties", "unevaluatedProperties")
) | {"items", "prefixItems", "unevaluatedItems"}
_NAMED = frozenset(("properties", "patternProperties", "$defs", "definitions"))
_SCHEMAS = frozenset(("items", "prefixItems", "additionalProperties", "anyOf", "oneOf", "allOf"))
_TYPED = _OF_PARTS | {*_WHOLE, "type", "enum", "const"}
_HOLDING = _TYPED | _OF_VALUES | _UNKNOWN
"""What says something about a value; all else are notes, such as titles."""


def first_unheld(schema: Any) -> str | None:
    """The first keyword in a schema that the library reads over, and why; None if there is none."""
    level = [schema] if isinstance(schema, dict) else []
    while level:
        below = []
        for each in level:
            for name, reason in _unheld(each, schema).items():
                return f"{name} {reason}"
            below += [inner for name in each for inner in _schemas_below(each, name)]
        level = [each for each in below if isinstance(each, dict)]
    return None


def held_part(schema: Any, root: Any) -> Any:
    """A schema without what the library reads over; for a shape that is wished and not promised."""
    if not isinstance(schema, dict):
        return schema
    ignored = _unheld(schema, root)
    return {name: _held_below(name, inner, root) for name, inner in schema.items() if name not in ignored}


def _held_below(name: str, inner: Any, root: Any) -> Any:
    if name in _NAMED and isinstance(inner, dict):
        return {key: held_part(value, root) for key, value in inner.items()}
    if name not in _SCHEMAS:
        return inner
    return [held_part(each, root) for each in inner] if isinstance(inner, list) else held_part(inner, root)


def _schemas_below(schema: Mapping[str, Any], name: str) -> list[Any]:
    inner = schema[name]
    if name in _NAMED:
        return list(inner.values()) if isinstance(inner, dict) else []
    if name in _SCHEMAS:
        return inner if isinstance(inner, list) else [inner]
    return []


def _unheld(schema: Mapping[str, Any], root: Any) -> dict[str, str]:
    """Keywords of one (sub)schema that the library reads over, each with the reason."""
    found = {name: "cannot be held to" for name in _UNKNOWN & schema.keys() if schema[name] is not False}
    found.update(_beside_whole(schema, root))
    if not schema.keys() & _TYPED:
        found.update(dict.fromkeys(schema.keys() & _OF_VALUES, "is not held to without a type"))
    if isinstance(schema.get("pattern"), str) and (why_not := _unheld_pattern(schema["pattern"])):
        found["pattern"] = why_not
    if "pattern" in schema:
        beside = {"minLength", "maxLength"} & schema.keys()
        found.update(dict.fromkeys(beside, "is not held to beside a pattern, which can say the same"))
    if "multipleOf" in schema and not _is_integral(schema):
        found["multipleOf"] = "is held to for integers only"
    known = schema.get("properties")
    named = schema.get("required")
    if "required" not in found and "patternProperties" not in schema and isinstance(named, list):
        missing = [name for name in named if not isinstance(known, dict) or name not in known]
        if missing:
            found["required"] = f"has {str(missing[0])[:100]!r}, which is not among the properties"
    return found


def _beside_whole(schema: Mapping[str, Any], root: Any) -> Iterator[tuple[str, str]]:
    whole = next((name for name in _WHOLE if name in schema), None)
    if whole is None or schema.keys() & {"const", "enum"}:
        return
    alternatives = [schema] if whole == "$ref" else schema[whole]
    if not isinstance(alternatives, list):
        return  # the library says what is wrong
    if (
        whole == "allOf"
        and sum(isinstance(each, dict) and bool(each.keys() & _HOLDING) for each in alternatives) > 1
    ):
        yield whole, "of several schemas cannot be held to: write them as one"
    for name in sorted(schema.keys() & _HOLDING - {whole}):
        if name != "type" or any(_type_of(each, root) != schema["type"] for each in alternatives):
            yield name, f"is not held to beside {whole}"


def _type_of(schema: Any, root: Any) -> Any:
    """The type of a schema, or of what it refers to."""
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
    """The library looks ahead at nothing, and writes quotes and backslashes as no JSON can have them."""
    for part in _PARTS_OF_PATTERNS.finditer(pattern):
        if part["lookahead"]:
            return "with a lookahead cannot be held to"
        if part["raw"]:
            return f"with {part['raw']} cannot be held to inside JSON"
    reason = misread(pattern)
    return None if reason is None else f"is not held to: {reason}"
