"""Grammars, expressions and schemas made up at random, as a stranger might send them."""

import json
import random
from typing import Any

from ostinato.text.structured import StructuredOutputs


def random_grammar(seed: int) -> StructuredOutputs:
    """The same for the same seed."""
    chance = random.Random(seed)
    kind = chance.choice(("grammar", "grammar", "regex", "json"))
    if kind == "grammar":
        return StructuredOutputs(grammar=_ebnf(chance))
    if kind == "regex":
        return StructuredOutputs(regex=_regex(chance, chance.randint(1, 4)))
    return StructuredOutputs(json=json.dumps(_schema(chance, chance.randint(0, 3))))


def _ebnf(chance: random.Random) -> str:
    names = ["root", *(f"r{at}" for at in range(chance.randint(0, 4)))]
    return "\n".join(f"{name} ::= {_choice(chance, names, chance.randint(1, 3))}" for name in names)


def _choice(chance: random.Random, names: list[str], depth: int) -> str:
    return " | ".join(
        " ".join(_part(chance, names, depth) for _ in range(chance.randint(1, 3)))
        for _ in range(chance.randint(1, 3))
    )


def _part(chance: random.Random, names: list[str], depth: int) -> str:
    kinds = ["literal", "class", "name", "empty"] + (["group"] * 3 if depth else [])
    match chance.choice(kinds):
        case "literal":
            found = json.dumps("".join(chance.choices("ab01 é\n", k=chance.randint(1, 3))))
        case "class":
            found = chance.choice(("[a-z]", "[^a]", "[0-9]", "[^\\n]", "[a-]", "[\\x00-\\xff]"))
        case "name":
            found = chance.choice(names)
        case "empty":
            found = '""'
        case _:
            found = f"({_choice(chance, names, depth - 1)})"
    return found + _count(chance)


def _count(chance: random.Random) -> str:
    low = chance.choice((0, 1, 2, 30))
    counts = (
        "",
        "",
        "",
        "*",
        "+",
        "?",
        f"{{{low}}}",
        f"{{{low},}}",
        f"{{{low},{low + chance.randint(0, 40)}}}",
    )
    return chance.choice(counts)


def _regex(chance: random.Random, depth: int) -> str:
    parts = []
    for _ in range(chance.randint(1, 4)):
        kinds = ["letter", "class", "any"] + (["group", "group", "look"] if depth else [])
        match chance.choice(kinds):
            case "letter":
                part = chance.choice(("a", "b", "\\d", "\\w", "\\s", "é", "\\.", "\\u00e9", "\\p{L}"))
            case "class":
                part = chance.choice(("[a-f]", "[^a]", "[\\d_]", "[]", "[z-a]"))
            case "any":
                part = "."
            case "look":
                part = f"(?={_regex(chance, depth - 1)})"
            case _:
                part = f"({_regex(chance, depth - 1)}|{_regex(chance, depth - 1)})"
        parts.append(part + _count(chance))
    return "".join(parts)


def _schema(chance: random.Random, depth: int) -> Any:
    leaves: list[Any] = [
        {"type": "string", "maxLength": chance.choice((0, 3, 50)), "minLength": chance.choice((0, 2, 60))},
        {"type": "string", "pattern": _regex(chance, 1)},
        {"type": "integer", "minimum": chance.randint(-50, 50), "maximum": chance.randint(-50, 50)},
        {"type": "number", "exclusiveMinimum": chance.random()},
        {"enum": chance.choices(["a", 1, None, [], {"x": 1}], k=2)},
        {"const": chance.choice(["a", 1.5, None])},
        {"type": chance.choice(["null", "boolean", "array", "object", ["string", "null"], "nothing"])},
        {"type": "string", "format": chance.choice(["date", "uuid", "email", "no-such"])},
        {"$ref": chance.choice(["#", "#/properties/a", "#/$defs/x", "#/nowhere"])},
        chance.choice([True, False, {}]),
    ]
    if not depth:
        return chance.choice(leaves)
    inner = [_schema(chance, depth - 1) for _ in range(2)]
    return chance.choice(
        [
            {"type": "object", "properties": dict(zip("ab", inner, strict=True)), "required": ["a"]},
            {"type": "array", "items": inner[0], "minItems": chance.choice((0, 2)), "maxItems": 4},
            {"type": "array", "prefixItems": inner},
            {"anyOf": inner},
            {"allOf": inner},
            {"oneOf": inner},
            {"not": inner[0]},
            {"type": "object", "patternProperties": {_regex(chance, 1): inner[0]}},
            {"type": "object", "additionalProperties": inner[0], "minProperties": chance.choice((0, 2))},
            {"$defs": {"x": inner[0]}, "$ref": "#/$defs/x"},
        ]
    )
