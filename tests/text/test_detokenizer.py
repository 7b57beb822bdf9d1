"""Streamed text: whole characters only, and together exactly the decoded whole."""

from itertools import accumulate, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from .small_tokenizers import KINDS, small_tokenizer

TEXT = st.text(
    st.one_of(st.characters(codec="utf-8"), st.sampled_from("aé 日👩‍🙂\n\u2581\ufffd")), max_size=40
)
kinds = pytest.mark.parametrize("kind", KINDS)


def chunks(ids: list[int], sizes: list[int]) -> list[list[int]]:
    ends = [0, *accumulate(sizes), len(ids)]
    return [ids[start:end] for start, end in pairwise(ends)]


@kinds
@settings(max_examples=150, deadline=None)
@given(text=TEXT, sizes=st.lists(st.integers(0, 4), max_size=40))
def test_pieces_add_up_to_the_text(kind: str, text: str, sizes: list[int]) -> None:
    tokenizer = small_tokenizer(kind)
    ids = tokenizer.encode(text)
    stream = tokenizer.detokenizer()
    pieces = [stream.push(part) for part in chunks(ids, [*sizes, len(ids)])] + [stream.finish()]
    assert "".join(pieces) == tokenizer.backend.decode(ids) == tokenizer.decode(ids)
    if "\ufffd" not in text:
        assert not any("\ufffd" in piece for piece in pieces)


@settings(max_examples=150, deadline=None)
@given(data=st.data(), skip=st.booleans())
def test_any_byte_level_ids_at_all_decode_as_the_library_does(data: st.DataObject, skip: bool) -> None:
    tokenizer = small_tokenizer("byte-level")
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=30))
    stream = tokenizer.detokenizer(skip_special_tokens=skip)
    pieces = [stream.push([index]) for index in ids] + [stream.finish()]
    assert "".join(pieces) == tokenizer.backend.decode(ids, skip_special_tokens=skip)


@kinds
def test_a_character_of_four_tokens_comes_with_the_last(kind: str) -> None:
    tokenizer = small_tokenizer(kind)
    emoji = "\U0001f9ff"
    ids = tokenizer.encode("a" + emoji, add_special_tokens=False)
    stream = tokenizer.detokenizer()
    pieces = [stream.push([index]) for index in ids]
    assert [piece for piece in pieces if piece] == ["a", emoji]
    assert pieces[-1] == emoji
    assert stream.finish() == ""


@kinds
def test_a_text_cut_inside_a_character_ends_in_one_replacement(kind: str) -> None:
    tokenizer = small_tokenizer(kind)
    ids = tokenizer.encode("a\U0001f9ff", add_special_tokens=False)[:-1]
    stream = tokenizer.detokenizer()
    assert stream.push(ids) == "a"
    assert stream.finish() == "\ufffd"


def test_special_tokens_are_skipped_unless_wanted() -> None:
    tokenizer = small_tokenizer("byte-level")
    ids = [1, *tokenizer.encode("fox"), 2]
    assert tokenizer.decode(ids) == "fox"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<s>fox</s>"


def test_ids_outside_the_vocabulary_have_no_text() -> None:
    tokenizer = small_tokenizer("byte-level")
    assert tokenizer.decode([-1, *tokenizer.encode("fox"), 10**6]) == "fox"


@kinds
@settings(max_examples=150, deadline=None)
@given(prompt=TEXT, cut=st.integers(0, 60), bos=st.booleans(), skip=st.booleans())
def test_an_answer_goes_on_where_its_prompt_ends(
    kind: str, prompt: str, cut: int, bos: bool, skip: bool
) -> None:
    tokenizer = small_tokenizer(kind)
    ids = [1] * bos + tokenizer.encode(prompt + " fox dogs")
    before, answer = ids[:cut], ids[cut:]
    stream = tokenizer.detokenizer(skip_special_tokens=skip, behind=before)
    text = tokenizer.decode(before, skip_special_tokens=skip)
    if text.endswith("\ufffd"):
        return  # cut inside a character
    assert text + stream.push(answer) + stream.finish() == tokenizer.decode(ids, skip_special_tokens=skip)


def test_a_token_keeps_its_space() -> None:
    tokenizer = small_tokenizer("sentencepiece")
    ids = tokenizer.encode("fox fox")
    assert "".join(map(tokenizer.token_text, ids)) == " fox fox"
    assert tokenizer.token_text(2) == "</s>"
