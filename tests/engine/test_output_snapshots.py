"""A long answer read piece by piece costs what is read of it, however many copies of it were handed out."""

from __future__ import annotations

from types import MethodType, SimpleNamespace
from typing import Any

import pytest

from ostinato.engine.delivery import completion_text
from ostinato.engine.delivery.completion_text import CompletionText
from ostinato.engine.outputs import CompletionOutput, Logprob, RequestOutput
from ostinato.engine.parameters.sampling_params import SamplingParams
from ostinato.server.openai.completion import Completion
from ostinato.server.openai.served_model import ServedModel
from text.small_tokenizers import small_tokenizer

TOKENIZER = small_tokenizer("byte-level")
TEXT = "So it goes on, and on. Ça continue. 🙂\n" * 60
IDS = TOKENIZER.encode(TEXT)


class CountedList(list[Any]):
    """Counts what is copied out of it."""

    copied = 0

    def copy(self) -> list[Any]:
        self.copied += len(self)
        return super().copy()

    def __getitem__(self, place: Any) -> Any:
        found = super().__getitem__(place)
        self.copied += len(found) if isinstance(place, slice) else 0
        return found


class Growing:
    """A request whose answer grows by a token at a time, as `Delivery` lets it grow."""

    def __init__(self) -> None:
        self.token_ids, self.logprobs = CountedList(), CountedList()
        self.text = CompletionText(TOKENIZER.detokenizer(), self.token_ids)
        self.output = CompletionOutput(0, token_ids=self.token_ids, logprobs=self.logprobs)
        self.output.text = self.text  # type: ignore[assignment]
        self.whole = RequestOutput("a", None, [1, 2], [self.output], CountedList([None, None]))

    def grow(self, token: int) -> None:
        self.token_ids.append(token)
        self.logprobs.append({token: Logprob(-1.0)})

    def end(self) -> None:
        self.text.finish()
        self.output.text, self.output.finish_reason = self.text.text, "length"  # type: ignore[assignment]


@pytest.fixture
def characters(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many were put together, one entry for each time the text of a copy was."""
    made: list[int] = []
    pieces = completion_text._Pieces
    joined, since = pieces.joined, pieces.since

    def counted(function: Any) -> Any:
        def call(self: Any, *args: int) -> str:
            found: str = function(self, *args)
            made.append(len(found))
            return found

        return call

    monkeypatch.setattr(pieces, "joined", counted(joined))
    monkeypatch.setattr(pieces, "since", counted(since))
    return made


def test_a_copy_that_nobody_reads_costs_nothing(characters: list[int]) -> None:
    growing, copies = Growing(), []
    for token in IDS:
        growing.grow(token)
        copies.append(growing.whole.snapshot())
    assert growing.token_ids.copied == growing.logprobs.copied == 0
    assert growing.whole.prompt_logprobs.copied == 0  # type: ignore[union-attr]
    assert characters == []
    growing.end()
    last = growing.whole.snapshot().outputs[0]
    assert (last.token_ids, last.text) == (IDS, TEXT)
    assert growing.token_ids.copied == 0, "what has ended is shared"


@pytest.mark.parametrize("order", [1, -1])
def test_copies_that_are_kept_are_what_they_were(order: int) -> None:
    growing, copies, texts = Growing(), [], []
    detokenizer, text = TOKENIZER.detokenizer(), ""
    for token in IDS[:300]:
        growing.grow(token)
        text += detokenizer.push_one(token)
        texts.append(text)
        copies.append(growing.whole.snapshot())
    for count, taken in list(enumerate(copies, start=1))[::order]:
        [output] = taken.outputs
        assert output.text == texts[count - 1]
        assert output.token_ids == IDS[:count]
        assert output.token_ids is output.token_ids
        assert [list(each) for each in output.logprobs or []] == [[token] for token in IDS[:count]]
        assert not taken.finished
        assert taken.prompt_token_ids == [1, 2]
        for start in (0, len(texts[count - 1]) // 2, len(texts[count - 1])):
            assert output.text_since(start) == texts[count - 1][start:]


def test_a_reader_of_what_is_new_reads_all_of_it_once(characters: list[int]) -> None:
    growing, shown = Growing(), ""
    for token in IDS:
        growing.grow(token)
        shown += growing.whole.snapshot().outputs[0].text_since(len(shown))
    assert sum(characters) == len(shown)
    growing.end()
    shown += growing.whole.snapshot().outputs[0].text_since(len(shown))
    assert shown == TEXT


def test_a_stream_of_the_server_puts_every_character_together_once(characters: list[int]) -> None:
    model: Any = SimpleNamespace(detokenizer=lambda *_, **__: TOKENIZER.detokenizer(), adapter=None)
    for stop in (None, "\x00never"):
        characters.clear()
        completion = Completion(0, [1], SamplingParams(stop=stop, max_tokens=len(IDS)), model, wakes_every=1)
        shown = ""
        for token in IDS:
            completion.take_token(token)
            shown += completion.take().text
        assert shown == TEXT
        assert sum(characters) == len(TEXT)


def test_an_answer_of_the_server_goes_on_where_its_prompt_ends() -> None:
    model: Any = SimpleNamespace(tokenizer=small_tokenizer("sentencepiece"), adapter=None)
    model.detokenizer = MethodType(ServedModel.detokenizer, model)
    ids = model.tokenizer.encode("The fox")
    completion = Completion(0, [1, *ids], SamplingParams(), model, wakes_every=1)
    for token in model.tokenizer.encode("jumps"):
        completion.take_token(token)
    assert completion.take().text == " jumps"
