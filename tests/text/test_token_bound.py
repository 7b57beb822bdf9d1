"""The most bytes that a token stands for: no text has more of them for each of its tokens."""

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from ostinato.text.token_bound import most_bytes_per_token

from .small_tokenizers import KINDS

HARD = st.text(st.sampled_from("ab 1\n\t\u0301e\u1100\u1161\u11a8\U0001f600é#"), max_size=200)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=60, deadline=None)
@given(text=HARD)
def test_no_token_stands_for_more(kind: str, text: str) -> None:
    backend = backend_of(kind)
    bound = most_bytes_per_token(backend)
    if bound is not None:
        tokens = len(backend.encode(text, add_special_tokens=False).ids)
        assert tokens * bound >= len(text.encode())


def backend_of(kind: str) -> tokenizers.Tokenizer:
    if kind not in _MADE:
        _MADE[kind] = KINDS[kind]()
    return _MADE[kind]


_MADE: dict[str, tokenizers.Tokenizer] = {}


def byte_level(**changed: object) -> tokenizers.Tokenizer:
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    vocabulary = {letter: number for number, letter in enumerate(sorted(alphabet))}
    made = tokenizers.Tokenizer(tokenizers.models.BPE({**vocabulary, "aaaa": 256}, []))
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    for name, value in changed.items():
        setattr(made, name, value)
    return made


def test_the_longest_token_counts() -> None:
    assert most_bytes_per_token(byte_level()) == 4
    longer = byte_level()
    longer.add_special_tokens([tokenizers.AddedToken("<|é|>", special=True)])
    assert most_bytes_per_token(longer) == 6


def test_composition_shortens_a_text() -> None:
    assert most_bytes_per_token(byte_level(normalizer=tokenizers.normalizers.NFC())) == 12


def test_where_a_token_may_stand_for_anything_there_is_no_bound() -> None:
    normalizers, pre_tokenizers = tokenizers.normalizers, tokenizers.pre_tokenizers
    for unbounded in (
        byte_level(normalizer=normalizers.Strip()),
        byte_level(normalizer=normalizers.Replace(tokenizers.Regex("x+"), "")),
        byte_level(pre_tokenizer=pre_tokenizers.Whitespace()),
        byte_level(pre_tokenizer=None),
    ):
        assert most_bytes_per_token(unbounded) is None
    absorbing = byte_level()
    absorbing.add_special_tokens([tokenizers.AddedToken("<m>", lstrip=True, special=True)])
    assert most_bytes_per_token(absorbing) is None
    cutting = byte_level()
    cutting.enable_truncation(5)
    assert most_bytes_per_token(cutting) is None
