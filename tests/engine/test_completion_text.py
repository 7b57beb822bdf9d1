"""Text that is made when it is read, and stop strings that are found with the token that completes them."""

from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from ostinato.engine.delivery.completion_text import CompletionText
from text.small_tokenizers import small_tokenizer

TOKENIZER = small_tokenizer("byte-level")
TEXT = st.text(alphabet="aab\né🙂", max_size=30)
STOPS = st.lists(st.text(alphabet="ab\né", min_size=1, max_size=4), min_size=1, max_size=3)


def settled(text: str, stops: Sequence[str]) -> str:
    """Without the longest end that could become a stop string."""
    for at in range(len(text)):
        if any(stop != text[at:] and stop.startswith(text[at:]) for stop in stops):
            return text[:at]
    return text


@settings(max_examples=100, deadline=None)
@given(text=TEXT, reads=st.lists(st.booleans(), min_size=120, max_size=120), pushes=st.booleans())
def test_text_is_that_of_the_tokens_so_far_whenever_it_is_read(
    text: str, reads: list[bool], pushes: bool
) -> None:
    ids, eager, token_ids = TOKENIZER.encode(text), TOKENIZER.detokenizer(), list[int]()
    growing, so_far = CompletionText(TOKENIZER.detokenizer(), token_ids), ""
    for token, read in zip(ids, reads, strict=False):
        so_far += eager.push([token])
        if pushes:
            assert growing.push(token) is None
        else:
            token_ids.append(token)
        if read:
            assert growing.text == so_far
    assert token_ids == ids
    assert growing.finish() is None
    assert growing.text == TOKENIZER.decode(ids)


@settings(max_examples=100, deadline=None)
@given(text=TEXT, is_read=st.booleans(), stops=st.one_of(st.just([]), STOPS))
def test_a_last_token_that_is_no_text_leaves_none(text: str, is_read: bool, stops: list[str]) -> None:
    ids = TOKENIZER.encode(text)
    growing = CompletionText(TOKENIZER.detokenizer(skip_special_tokens=False), token_ids := [], stops)
    for token in ids:
        if growing.push(token) is not None:
            return
    if is_read:
        assert text.startswith(growing.text)
    token_ids.append(2)
    assert growing.finish(without_last=True) is None
    assert growing.text == text


@settings(max_examples=150, deadline=None)
@given(text=TEXT, stops=STOPS, include=st.booleans(), min_tokens=st.sampled_from([0, 0, 3]))
def test_a_stop_string_ends_the_text_where_it_begins(
    text: str, stops: list[str], include: bool, min_tokens: int
) -> None:
    eager, so_far, early = TOKENIZER.detokenizer(), "", 0
    growing = CompletionText(TOKENIZER.detokenizer(), [], stops, include_stop=include)
    for count, token in enumerate(TOKENIZER.encode(text), 1):
        so_far += eager.push([token])
        may_stop = count > min_tokens
        early = early if may_stop else len(so_far)
        found = growing.push(token, may_stop=may_stop)
        # What counts is where it ends: it may have begun too early.
        first = {stop: so_far.find(stop, max(0, early + 1 - len(stop))) for stop in stops}
        places = [(at, stop) for stop, at in first.items() if at >= 0]
        if places:
            at, stop = min(places)
            assert found == stop
            assert growing.text == so_far[: at + (len(stop) if include else 0)]
            return
        assert found is None
        assert growing.text == settled(so_far, stops)
    assert growing.finish() is None
    assert growing.text == text
