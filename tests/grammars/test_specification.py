"""What the library is never shown is refused by name; what only looks like it is not."""

import json
from typing import Any

import pytest
import xgrammar
from xgrammar.testing import _is_grammar_accept_string

from ostinato.grammars.library import plain_words
from ostinato.grammars.specification import check
from ostinato.text.errors import GrammarError
from ostinato.text.schema_keywords import held_part

DEEP: Any = {"type": "object"}
for _ in range(300):
    DEEP = {"type": "object", "properties": {"x": DEEP}}


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ({"$ref": "file:///etc/passwd"}, "files and URLs are not read"),
        ({"properties": {"a": {"items": {"$ref": "https://example.org/s"}}}}, r"https://example\.org/s"),
        ({"$ref": "other.json#/a"}, "leads outside"),
        ({"$ref": "#"}, "refers to itself"),
        ({"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}, "itself"),
        ({"$ref": "#/$defs/nowhere"}, "no such place"),
        ({"properties": {"enum": {"$ref": "file:///x"}}}, "leads outside"),
        ({"properties": {"$ref": {"$ref": "file:///x"}}}, "leads outside"),
        ({"pattern": "(a{900}){2000}"}, "1,800,000 times"),
        ({"enum": ["\ud800"]}, "surrogate"),
        (DEEP, "levels deep"),
    ],
)
def test_schemas_that_are_refused(schema: Any, reason: str) -> None:
    with pytest.raises(GrammarError, match=reason):
        check("json", json.dumps(schema))
    tag = {"type": "structural_tag", "format": {"type": "json_schema", "json_schema": schema}}
    with pytest.raises(GrammarError, match=reason):
        check("structural_tag", json.dumps(tag))


@pytest.mark.parametrize(
    "schema",
    [
        {"$defs": {"n": {"type": "object", "properties": {"n": {"$ref": "#/$defs/n"}}}}, "$ref": "#/$defs/n"},
        {"type": "object", "properties": {"self": {"$ref": "#"}}},
        {"const": {"$ref": "file:///etc/passwd"}},
        {"enum": [{"$ref": "file:///etc/passwd"}]},
        {"properties": {"$ref": {"type": "string"}}},
        {"$defs": {"a/b": {"~": {"type": "null"}}}, "$ref": "#/$defs/a~1b/~0"},
        {"type": "string", "maxLength": 100},
    ],
)
def test_schemas_that_only_look_like_it(schema: Any) -> None:
    check("json", json.dumps(schema))


OBJECT = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}
UNHELD = [
    ({"not": {"type": "string"}}, '"x"', "not cannot"),
    ({"type": "array", "items": {"type": "integer"}, "uniqueItems": True}, "[1, 1]", "uniqueItems cannot"),
    ({"type": "array", "items": {"type": "integer"}, "contains": {"const": 1}}, "[2]", "contains cannot"),
    ({**OBJECT, "dependentRequired": {"a": ["b"]}}, '{"a": 1}', "dependentRequired cannot"),
    ({**OBJECT, "dependentSchemas": {"a": {"required": ["b"]}}}, '{"a": 1}', "dependentSchemas cannot"),
    ({**OBJECT, "if": {"required": ["a"]}, "then": {"required": ["b"]}}, '{"a": 1}', "if cannot"),
    ({**OBJECT, "required": ["c"]}, '{"a": 1}', "required has 'c'"),
    ({**OBJECT, "anyOf": [OBJECT | {"required": ["b"]}], "required": ["a"]}, '{"b": 1}', "beside anyOf"),
    ({"allOf": [OBJECT, OBJECT | {"required": ["a"]}]}, "{}", "allOf of several"),
    ({"$defs": {"n": {"type": "integer"}}, "$ref": "#/$defs/n", "minimum": 5}, "1", "minimum is not held"),
    ({"type": "number", "multipleOf": 2}, "3", "multipleOf is held to for integers only"),
    ({"type": "string", "pattern": "^a+$", "maxLength": 2}, '"aaaa"', "maxLength is not held to beside"),
    ({"minimum": 5}, "1", "without a type"),
    ({"type": "string", "pattern": "^(?!a)[ab]$"}, '"a"', "pattern with a lookahead"),
    ({"type": "string", "pattern": '^a"$'}, '"a""', "inside JSON"),
    ({"type": "string", "pattern": r"^[\\]$"}, '"\\"', "inside JSON"),
    ({"type": "string", "pattern": r"^a\n$"}, '"a\n"', "inside JSON"),
]
"""Schemas, what is against them, and the words of their refusal."""


@pytest.mark.parametrize(("schema", "against", "reason"), UNHELD)
def test_what_the_library_reads_over_is_refused(schema: Any, against: str, reason: str) -> None:
    grammar = xgrammar.Grammar.from_json_schema(json.dumps(schema))
    assert _is_grammar_accept_string(grammar, against), "the library has learned it: it need not be refused"
    inside = {
        "type": "array",
        "items": {"anyOf": [{"type": "null"}, schema]},
        "$defs": schema.get("$defs", {}),
    }
    for whole in (schema, inside):
        with pytest.raises(GrammarError, match=reason):
            check("json", json.dumps(whole))
    kept = held_part(inside, inside)
    check("json", json.dumps(kept))
    assert kept.keys() == inside.keys()


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "integer", "multipleOf": 7, "minimum": 10},
        {"type": ["integer", "null"], "multipleOf": 7.0},
        {"title": "A", "anyOf": [{"type": "string"}, {"type": "null"}], "default": None, "description": "d"},
        {"$defs": {"n": OBJECT}, "allOf": [{"$ref": "#/$defs/n"}, {"description": "d"}], "title": "N"},
        {"$defs": {"n": OBJECT}, "type": "object", "oneOf": [{"$ref": "#/$defs/n"}, OBJECT]},
        {"properties": {"not": {"type": "string"}, "if": {"type": "null"}}, "required": ["not", "if"]},
        {"type": "object", "propertyNames": {"pattern": "^x+$"}},
        {"type": "array", "items": {"type": "string"}, "uniqueItems": False},
        {"type": "string", "example": {"not": 1, "pattern": "x"}, "x-note": {"required": ["y"]}},
        {"type": "string", "pattern": r'^[^"\\\n]+\(\?=\.x\]$'},
        {"const": {"not": 1, "required": ["a"]}},
        {"type": "string", "format": "int64", "enum": ["a"]},
        True,
    ],
)
def test_what_the_library_holds_to_is_not_refused(schema: Any) -> None:
    check("json", json.dumps(schema))
    assert held_part(schema, schema) == schema


@pytest.mark.parametrize(
    ("kind", "text", "allowed"),
    [
        ("regex", "((a{100}){100}){100}", True),
        ("regex", "((a{100}){100}){101}", False),
        ("regex", "((a{1000})*b{2}){1000,1001}", False),
        ("regex", r"\(a{9000}\){9000}", True),
        ("regex", "[(){}]{9000}[{9999999}]", True),
        ("regex", "a{9999999999999999999999}", False),
        ("regex", "(" * 300 + ")" * 300, False),
        ("regex", "{,}{}{x}){5}", True),
        ("grammar", 'root ::= ("a"{2000}){2000}', False),
        ("grammar", 'root ::= "{2000}" "({2000})"{2000}', True),
    ],
)
def test_repetitions_are_multiplied(kind: str, text: str, allowed: bool) -> None:
    if allowed:
        check(kind, text)
    else:
        with pytest.raises(GrammarError, match=r"times|levels"):
            check(kind, text)


def test_messages_of_the_library_lose_places_in_its_source() -> None:
    raw = '[23:09:23] /project/cpp/json_schema_converter.cc:4944: Unsupported type "strin"\n'
    assert plain_words(raw) == 'Unsupported type "strin"'
    raw = "[01:02:03] /a/b.cc:49: Check failed: (error.empty()) is false: Failed to parse JSON\n at x.h:3:"
    assert plain_words(raw) == "Failed to parse JSON at"
    assert "memory" in plain_words("std::bad_alloc")


def test_escapes_that_the_library_takes_for_letters() -> None:
    assert _is_grammar_accept_string(xgrammar.Grammar.from_regex(r"\Aa\Z"), "AaZ")
    for kind, text in (("regex", r"\Aa\Z"), ("json", json.dumps({"type": "string", "pattern": r"a\z"}))):
        with pytest.raises(GrammarError, match=r"\\[Az] is not known"):
            check(kind, text)
    check("regex", r"\\A\d+\.\x41\u00e9\-")


@pytest.mark.parametrize(
    "expression",
    [
        *("a$b", "a^", "x(^a)", "(a$)b", "(a|b$)c", "a(b|^c)", "a?^b"),
        *(r"\x41b", r"[\x41b]", r"\x{41}", r"\01", r"a\\\x41b"),
    ],
)
def test_expressions_that_would_be_read_as_something_else_are_refused(expression: str) -> None:
    with pytest.raises(GrammarError, match=r"not read as written|cannot be held to"):
        check("regex", expression)
    with pytest.raises(GrammarError, match=r"not read as written|cannot be held to"):
        check("json", json.dumps({"type": "string", "pattern": expression}))
    assert held_part({"type": "string", "pattern": expression}, {}) == {"type": "string"}


@pytest.mark.parametrize(
    "expression",
    [
        *("", "^", "$", "^$", "^^a$$", "^a|^b$", "(^a|b)$", "(?:^a|,)b", "(?P<n>^a)", "^(a|b)(,|$)", "(a$)?"),
        *("^(a$){2}$", r"a\$b", r"a\^b", "a[$^]b", r"[\]^]a", r"\x41\x42", r"\\x41b", r"\0", r"\u0041b"),
    ],
)
def test_expressions_that_only_look_like_it(expression: str) -> None:
    check("regex", expression)
