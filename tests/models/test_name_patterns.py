"""Names of layers against expressions: as Python's `re` decides, in time linear in the name."""

import random
import re
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ostinato.models.adapters.name_patterns import NamePattern

NAMES = [
    "model.layers.0.self_attn.q_proj",
    "model.layers.11.mlp.down_proj",
    "layers.2.mlp.up_proj",
    "lm_head",
    "q_proj",
    "",
    "a\nb",
]
EXPRESSIONS = [
    r".*\.(q_proj|v_proj)",
    r"model\.layers\.(1|11)\..*proj",
    r".*layers\.[0-9]+\.(self_attn|mlp)\.\w+",
    r"(.*\.)?(layers\.\d{1,2}\.mlp\.(up|down)_proj)$",
    r"^lm_head$",
    r"(?:q|k|v)_proj",
    r"[^.]*",
    r"x?(a|)+b*?",
    r".*",
    r"a.b",
    r"$^",
    r"(^|.*\.)q_proj",
]


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_names_match_as_in_python(expression: str) -> None:
    matches = NamePattern(expression).matches
    for name in NAMES:
        assert matches(name) == (re.fullmatch(expression, name) is not None), name


def written(random: random.Random, depth: int = 3) -> str:
    kind = random.randrange(8 if depth else 3)
    if kind < 2:
        return random.choice(["a", "b", r"\.", ".", "[ab]", r"[^a]", r"\d", r"\w", "1"])
    if kind == 2:
        return random.choice(["", "ab", "^", "$"])
    inner = [written(random, depth - 1) for _ in range(random.randint(1, 3))]
    if kind < 5:
        return "".join(inner)
    if kind == 5:
        return f"({'|'.join(inner)})"
    return f"(?:{''.join(inner)}){random.choice(['*', '+', '?', '{2}', '{1,3}', '*?', '{0,2}?'])}"


@given(st.integers(0, 10**9), st.text("ab1.", max_size=8))
def test_random_expressions_match_as_in_python(seed: int, name: str) -> None:
    expression = written(random.Random(seed))
    assert NamePattern(expression).matches(name) == (re.fullmatch(expression, name) is not None)


def test_expressions_that_make_python_backtrack_cost_nothing() -> None:
    began = time.process_time()
    for expression in (r"(a+)+b", r"(a|a)*b", r"(.*)*x(.*)*y", r"(a?){30}a{30}b"):
        assert not NamePattern(expression).matches("a" * 200)
    assert time.process_time() - began < 2


@pytest.mark.parametrize(
    "expression",
    [
        r"(a)\1",
        r"(?=a)a",
        r"(?<!b)a",
        r"(?i)a",
        "(",
        "a{99999}{99999}",
        "((a{500}){500}){500}",
        "(" * 3000,
        "a" * 5000,
        "(?:){999999999}",
        "((){9999}){9999}",
    ],
)
def test_what_cannot_be_matched_is_refused(expression: str) -> None:
    with pytest.raises(ValueError, match=r".+"):
        NamePattern(expression)
