"""What the library is never shown is refused by name; what only looks like it is not."""

import json
import random
from typing import Any

import jsonschema
import pytest
import xgrammar
from xgrammar import structural_tag
from xgrammar.testing import _is_grammar_accept_string

from ostinato.grammars.library import plain_words
from ostinato.grammars.specification import _TAG_FIELDS, checked
from ostinato.text.errors import GrammarError
from ostinato.text.schema_keywords import FORMATS, first_unheld, held_part

PARTS = [each for each in vars(structural_tag).values() if "type" in getattr(each, "model_fields", {})]
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
        ({"patternProperties": {"(a{900}){2000}": True}}, "1,800,000 times"),
        ({"enum": ["\ud800"]}, "surrogate"),
        (DEEP, "levels deep"),
    ],
)
def test_schemas_that_are_refused(schema: Any, reason: str) -> None:
    with pytest.raises(GrammarError, match=reason):
        checked("json", json.dumps(schema))
    tag = {"type": "structural_tag", "format": {"type": "json_schema", "json_schema": schema}}
    with pytest.raises(GrammarError, match=reason):
        checked("structural_tag", json.dumps(tag))


def test_parts_of_a_structural_tag_have_no_other_fields() -> None:
    """The library reads over them."""
    part = {"type": "const_string", "value": "x"}
    for form, unknown in (
        ({**part, "valu": "y"}, "valu"),
        (
            {"type": "or", "elements": [part, {"type": "sequence", "elements": [], "at_least_one": True}]},
            "at_",
        ),
        ({"type": "triggered_tags", "triggers": ["<"], "tags": [], "at_least_onc": True}, "at_least_onc"),
    ):
        with pytest.raises(GrammarError, match=f"has no '{unknown}"):
            checked("structural_tag", json.dumps({"type": "structural_tag", "format": form}))
    for kind, fields in _TAG_FIELDS.items():
        [model] = [each for each in PARTS if each.model_fields["type"].default == kind]
        assert {"type", *fields.split()} == set(model.model_fields)
    schema = {
        "type": "json_schema",
        "json_schema": {"type": "object", "properties": {"or": {"type": "null"}}},
    }
    checked("structural_tag", json.dumps({"type": "structural_tag", "format": schema}))


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
    checked("json", json.dumps(schema))


OBJECT = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}
INTEGER = {"type": "integer"}


def named(rules: dict[str, Any], known: dict[str, Any] | None = None) -> dict[str, Any]:
    """An object with rules for its names."""
    return {"type": "object", **({} if known is None else {"properties": known}), **rules}


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
    (
        {"$defs": {"n": {"type": "integer"}}, "$ref": "#/$defs/n", "minimum": 5},
        "1",
        "minimum is not enforced",
    ),
    ({"type": "number", "multipleOf": 2}, "3", "multipleOf is enforced for integers only"),
    ({"type": "integer", "multipleOf": 7, "minimum": 10}, "11", "multipleOf is not enforced beside bounds"),
    ({"type": "integer", "multipleOf": 2, "exclusiveMaximum": 5}, "1", "multipleOf is not enforced beside"),
    (
        {"type": "array", "unevaluatedItems": {"type": "number", "multipleOf": 5}},
        "[1]",
        "multipleOf is enforced for integers only",
    ),
    ({"enum": [2.5, 1], "type": "integer"}, "2.5", "enum has '2.5', which is not of the type"),
    ({"const": None, "type": "string"}, "null", "const has 'None', which is not of the type"),
    ({"enum": [True, 1], "type": "integer"}, "true", "enum has 'True'"),
    ({"enum": [1, 5], "minimum": 3}, "1", "minimum is not enforced beside enum"),
    ({"const": {"b": 1}, "type": "object", "required": ["a"]}, '{"b":1}', "required"),
    ({"type": "string", "pattern": "^a+$", "maxLength": 2}, '"aaaa"', "maxLength is not enforced beside"),
    (
        {"type": "string", "format": "date", "maxLength": 3},
        '"2020-01-02"',
        "maxLength is not enforced beside format",
    ),
    (
        {"type": "string", "format": "ipv4", "pattern": "^a"},
        '"1.2.3.4"',
        "pattern is not enforced beside format",
    ),
    ({"minimum": 5}, "1", "without a type"),
    ({"type": "string", "pattern": "^(?!a)[ab]$"}, '"a"', "pattern with a lookahead"),
    ({"type": "string", "pattern": '^a"$'}, '"a""', "inside JSON"),
    ({"type": "string", "pattern": r"^[\\]$"}, '"\\"', "inside JSON"),
    ({"type": "string", "pattern": r"^a\n$"}, '"a\n"', "inside JSON"),
    (
        named({"patternProperties": {"^a$b": INTEGER}}),
        '{"ab": 1}',
        "before the end of an expression",
    ),
    (named({"patternProperties": {"^(?!a)[ab]$": INTEGER}}), '{"a": 1}', "a name with a lookahead"),
    (
        named({"patternProperties": {'^a"$': INTEGER}}),
        '{"a"": 1}',
        'a name with " cannot be enforced inside JSON',
    ),
    (
        named({"patternProperties": {"^a": INTEGER}, "additionalProperties": True}, {"b": INTEGER}),
        '{"ac": "x"}',
        "patternProperties is not enforced beside properties",
    ),
    (
        named(
            {"patternProperties": {"^a": INTEGER}, "unevaluatedProperties": {"type": "string"}},
            {"b": INTEGER},
        ),
        '{"ac": "x"}',
        "patternProperties is not enforced beside properties",
    ),
    (named({"patternProperties": {"^a": INTEGER}, "required": ["ab"]}), "{}", "required has 'ab'"),
    (
        named({"patternProperties": {"^a": INTEGER}, "required": ["ab"]}, {"b": INTEGER}),
        '{"b": 1}',
        "required has 'ab'",
    ),
    (
        named({"patternProperties": {"^a": INTEGER}, "propertyNames": {"minLength": 2}}),
        '{"a": 1}',
        "propertyNames is not enforced beside patternProperties",
    ),
    (
        named({"patternProperties": {"^a": {"type": "string"}}}, {"ab": INTEGER}),
        '{"ab": 1}',
        "is not enforced for listed properties",
    ),
    (
        named({"patternProperties": {"^[ab]$": INTEGER, "^a": {"type": "string"}}}),
        '{"a": 1}',
        "if a name may match two",
    ),
    (
        named({"propertyNames": {"enum": ["a"]}, "additionalProperties": False}),
        '{"a": 1}',
        "additionalProperties is not enforced beside propertyNames",
    ),
    (named({"propertyNames": {"pattern": "^a$b"}}), '{"ab": 1}', "before the end of an expression"),
    (named({"propertyNames": {"pattern": "^(?=b)[ab]$"}}), '{"a": 1}', "pattern with a lookahead"),
    (
        named({"propertyNames": {"pattern": "^a+$", "maxLength": 2}}),
        '{"aaa": 1}',
        "maxLength is not enforced",
    ),
    (named({"propertyNames": {"not": {"const": "a"}}}), '{"a": 1}', "not cannot"),
    (
        named({"propertyNames": {"pattern": "^[a-z]$"}}, {"B": INTEGER}),
        '{"B": 1}',
        "propertyNames is not enforced",
    ),
    (
        named({"propertyNames": {"format": "date"}}, {"B": INTEGER}),
        '{"B": 1}',
        "propertyNames is not enforced",
    ),
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
            checked("json", json.dumps(whole))
    kind, text = checked("loose_json", json.dumps(inside))
    kept = json.loads(text)
    assert (kind, kept.keys()) == ("json", inside.keys())
    part = {"type": "json_schema", "json_schema": inside, "strict": False}
    tag = {"type": "structural_tag", "format": {"type": "or", "elements": [part]}}
    kind, text = checked("structural_tag", json.dumps(tag))
    assert json.loads(text)["format"]["elements"] == [{"type": "json_schema", "json_schema": kept}]
    xgrammar.Grammar.from_structural_tag(text)
    for strict in (True, "no", None):
        part["strict"] = strict
        with pytest.raises(GrammarError):
            checked("structural_tag", json.dumps(tag))


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "integer", "multipleOf": 7},
        {"type": ["integer", "null"], "multipleOf": 7.0},
        {"enum": [1, None, 2.5], "type": ["number", "null"]},
        {"type": "integer", "enum": [1.0, 2], "description": "d"},
        {"title": "A", "anyOf": [{"type": "string"}, {"type": "null"}], "default": None, "description": "d"},
        {"$defs": {"n": OBJECT}, "allOf": [{"$ref": "#/$defs/n"}, {"description": "d"}], "title": "N"},
        {"$defs": {"n": OBJECT}, "type": "object", "oneOf": [{"$ref": "#/$defs/n"}, OBJECT]},
        {"properties": {"not": {"type": "string"}, "if": {"type": "null"}}, "required": ["not", "if"]},
        {"type": "object", "propertyNames": {"pattern": "^x+$"}},
        named({"propertyNames": {"maxLength": 3}}),
        named({"propertyNames": {"pattern": "^x+$", "description": "d"}}, {"xx": INTEGER}),
        named({"propertyNames": {"enum": ["a", "b"]}, "additionalProperties": INTEGER}),
        named({"patternProperties": {"^a[0-9]+$": INTEGER}, "additionalProperties": False}),
        named({"patternProperties": {"^S_": {"type": "string"}, "^I_": INTEGER}}),
        named({"patternProperties": {"^a": INTEGER}, "required": ["b"]}, {"b": INTEGER}),
        {"type": "array", "items": {"type": "string"}, "uniqueItems": False},
        {"type": "string", "example": {"not": 1, "pattern": "x"}, "x-note": {"required": ["y"]}},
        {"type": "string", "pattern": r'^[^"\\\n]+\(\?=\.x\]$'},
        {"const": {"not": 1, "required": ["a"]}},
        {"type": "string", "format": "int64", "enum": ["a"]},
        {"type": "string", "format": "password", "minLength": 8},
        True,
    ],
)
def test_what_the_library_holds_to_is_not_refused(schema: Any) -> None:
    checked("json", json.dumps(schema))
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
        checked(kind, text)
    else:
        with pytest.raises(GrammarError, match=r"times|levels"):
            checked(kind, text)


def test_messages_of_the_library_lose_places_in_its_source() -> None:
    raw = '[23:09:23] /project/cpp/json_schema_converter.cc:4944: Unsupported type "strin"\n'
    assert plain_words(raw) == 'Unsupported type "strin"'
    raw = "[01:02:03] /a/b.cc:49: Check failed: (error.empty()) is false: Failed to parse JSON\n at x.h:3:"
    assert plain_words(raw) == "Failed to parse JSON at"
    assert "memory" in plain_words("std::bad_alloc")


def test_escapes_that_the_library_takes_for_letters() -> None:
    assert _is_grammar_accept_string(xgrammar.Grammar.from_regex(r"\Aa\Z"), "AaZ")
    for kind, text in (("regex", r"\Aa\Z"), ("json", json.dumps({"type": "string", "pattern": r"a\z"}))):
        with pytest.raises(GrammarError, match=r"\\[Az] is not supported"):
            checked(kind, text)
    checked("regex", r"\\A\d+\.\x41\u00e9\-")


@pytest.mark.parametrize(
    "expression",
    [
        *("a$b", "a^", "x(^a)", "(a$)b", "(a|b$)c", "a(b|^c)", "a?^b"),
        *(r"\x41b", r"[\x41b]", r"\x{41}", r"\01", r"a\\\x41b"),
    ],
)
def test_expressions_that_would_be_read_as_something_else_are_refused(expression: str) -> None:
    with pytest.raises(GrammarError, match=r"not read as written|cannot be enforced"):
        checked("regex", expression)
    with pytest.raises(GrammarError, match=r"not read as written|cannot be enforced"):
        checked("json", json.dumps({"type": "string", "pattern": expression}))
    assert held_part({"type": "string", "pattern": expression}, {}) == {"type": "string"}


@pytest.mark.parametrize(
    "expression",
    [
        *("", "^", "$", "^$", "^^a$$", "^a|^b$", "(^a|b)$", "(?:^a|,)b", "(?P<n>^a)", "^(a|b)(,|$)", "(a$)?"),
        *("^(a$){2}$", r"a\$b", r"a\^b", "a[$^]b", r"[\]^]a", r"\x41\x42", r"\\x41b", r"\0", r"\u0041b"),
    ],
)
def test_expressions_that_only_look_like_it(expression: str) -> None:
    checked("regex", expression)


@pytest.mark.parametrize("form", [*sorted(FORMATS), "int64", "password", "regex"])
def test_formats_that_the_library_knows(form: str) -> None:
    grammar = xgrammar.Grammar.from_json_schema(json.dumps({"type": "string", "format": form}))
    holds = not all(_is_grammar_accept_string(grammar, json.dumps(text)) for text in ("%", "", "{", "x y"))
    assert holds == (form in FORMATS)


RULES = [{"type": "integer"}, {"type": "string"}]
EXPRESSIONS = ["^a", "b$", "^[a-z]$", "^a+$", "^x[0-9]$", "a", "^ab", "^a?b", "^b|^x", "^(a|b)$"]
FOR_NAMES = [{"pattern": "^a"}, {"pattern": "b$"}, {"enum": ["a", "b", "x1"]}, {"const": "a"}]
FOR_NAMES += [{"maxLength": 1}, {"minLength": 2}]
NAMES = ["a", "b", "ab", "B", "x1", "aa", "q", "xab", ""]


def random_object(chance: random.Random) -> dict[str, Any]:
    """A schema of rules for names that may contradict each other."""

    def rules(names: list[str]) -> dict[str, Any]:
        return {name: chance.choice(RULES) for name in chance.sample(names, chance.randint(1, 2))}

    found = {
        "properties": rules(NAMES[:5]),
        "patternProperties": rules(EXPRESSIONS),
        "propertyNames": chance.choice(FOR_NAMES),
        "additionalProperties": chance.choice([*RULES, True, False]),
        "unevaluatedProperties": chance.choice([*RULES, True, False]),
        "required": chance.sample(NAMES, 1),
        "minProperties": chance.randint(0, 2),
        "maxProperties": chance.randint(1, 2),
    }
    kept = chance.sample(sorted(found), chance.randint(1, 4))
    return {"type": "object"} | {name: found[name] for name in kept}


@pytest.mark.parametrize("number", [150, pytest.param(3000, marks=pytest.mark.slow)])
def test_objects_that_are_not_refused_are_held_to_all_rules_for_names(number: int) -> None:
    """What the library lets through is what the schema says, or less."""
    chance, num_held, num_accepted = random.Random(0), 0, 0
    texts = [{}] + [
        {name: chance.choice((1, "x")) for name in chance.sample(NAMES, count)} for count in (1, 2, 3) * 30
    ]
    while num_held < number:
        schema = random_object(chance)
        if first_unheld(schema) is not None:
            continue
        try:
            grammar = xgrammar.Grammar.from_json_schema(json.dumps(schema))
        except RuntimeError:  # the library sees that nothing can follow it
            continue
        num_held += 1
        right = jsonschema.Draft202012Validator(schema)
        for value in chance.sample(texts, 50):
            if _is_grammar_accept_string(grammar, json.dumps(value)):
                num_accepted += 1
                assert right.is_valid(value), json.dumps((schema, value))
    assert num_accepted > 300
