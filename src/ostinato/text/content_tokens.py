"""Reads special tokens that clients write into a conversation as the text that they are.

A chat template joins its own special tokens with what messages say, and in the result a client's `<|im_end|>`
looks like the template's. So the template is rendered once more, with the clients' characters exchanged for
others or with marks between them: where these come out, a special token is a client's. The template's own are
then exchanged for names that no client knows, and a tokenizer that knows only these reads the rest as text.

Nothing of this happens to a conversation whose texts have nothing in common with its special tokens.
"""

from __future__ import annotations

import re
import secrets
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

from .errors import TokenizerError

Rewrite = Callable[[str, bool], str]
"""Changes a text of the client; True: it is the name of a field."""
Span = tuple[int, int]

_TWINS = 0xF0000
"""A character's twin is that much further, where Unicode has nothing."""
_NO_TWINS_FROM = 0xFFFE
_REMEDY = "leave it out, or start the server with --content-special-tokens parse"
_KNOWN = 64
"""Sets of special tokens for which is kept what follows from them; a template has few."""
_REWRITING = re.compile(r"\breplace\b")


@dataclass(frozen=True)
class ClientTexts:
    """What a template gets from a client."""

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] | None
    variables: Mapping[str, Any]

    def rewritten(self, rewrite: Rewrite) -> ClientTexts:
        """Returns the same with all texts changed, except for roles."""
        messages = [
            {name: value if name == "role" else _rewritten(value, rewrite) for name, value in message.items()}
            for message in self.messages
        ]
        tools = None if self.tools is None else _rewritten(list(self.tools), rewrite)
        variables = {name: _rewritten(value, rewrite) for name, value in self.variables.items()}
        return ClientTexts(messages, tools, variables)

    def __iter__(self) -> Iterator[tuple[str, bool]]:
        """All texts; True with names of fields."""
        for message in self.messages:
            yield from _texts([value for name, value in message.items() if name != "role"])
        yield from _texts([self.tools, list(self.variables.values())])


class ContentTokens:
    """Token ids of conversations with one tokenizer."""

    def __init__(self, backend: Any) -> None:
        """`backend` is a `tokenizers.Tokenizer`."""
        import tokenizers

        self._special: dict[int, str] = {}
        self._known: dict[frozenset[int], _Letters] = {}
        self._others: list[str] = []
        """Added tokens that are not special: the tokenizer keeps them whole, whoever wrote them."""
        self._alias: dict[int, str] = {}
        # It shares the model: this takes no memory to speak of, and less than a millisecond.
        self._reader = tokenizers.Tokenizer(backend.model)
        self._reader.normalizer = backend.normalizer
        self._reader.pre_tokenizer = backend.pre_tokenizer
        secret = secrets.token_hex(12)
        known = []
        for id, token in backend.get_added_tokens_decoder().items():
            if token.special:
                self._special[id] = token.content
                self._alias[id] = f"\ue000{secret}:{id}\ue001"
                flags = {name: getattr(token, name) for name in ("lstrip", "rstrip", "single_word")}
                token = tokenizers.AddedToken(self._alias[id], normalized=False, special=True, **flags)
            else:
                self._others.append(token.content)
            known.append((id, token))
        self._reader.add_tokens([token for _, token in known])
        self._id = {self._reader.token_to_id(token.content): id for id, token in known}

    def ids(
        self,
        text: str,
        ids: list[int],
        given: ClientTexts,
        render: Callable[[ClientTexts], str],
        template: str | None,
    ) -> list[int]:
        """Returns `ids`, the token ids of `text`, unless it has special tokens that are a client's.

        `render` makes a text of other texts; `template` is the source of the template that it uses. Raises
        TokenizerError where it cannot be known whose a special token is.
        """
        present = frozenset(self._special.keys() & set(ids))
        if not present:
            return ids
        letters = self._letters_of(present)
        texts = _Texts(given, letters)
        is_full = texts.have_any_whole
        # A normalizer may make special tokens of texts that are none.
        is_full = is_full or any(ids.count(id) != text.count(token) for token, id in letters.ids.items())
        is_rewritten = template is not None and _REWRITING.search(template) is not None
        if not is_full and not is_rewritten and not texts.have_any_part:
            return ids
        found = texts.places(text, render, is_rewritten)
        if found is None:
            if not is_full:
                return ids
            name = [*texts.whole, *letters.ids][0]
            raise TokenizerError(
                f"a text of the conversation has the special token {name!r}, and what the chat template "
                f"makes of that text does not show which special tokens are its own: {_REMEDY}"
            )
        matches = [match for match in letters.pattern.finditer(text) if match[0] in letters.ids]
        all_spans = [(*match.span(), letters.ids[match[0]]) for match in matches]
        own = [(begin, end, id) for begin, end, id in all_spans if not found(begin, end)]
        if len(own) == len(all_spans) and not is_full:
            return ids
        read = self._read(text, own)
        is_own = sum(id in self._special for id in read) == len(own)
        if not is_own or self._read(text, all_spans) != ids:
            message = "a text of the conversation has a special token that this tokenizer cannot read as text"
            raise TokenizerError(f"{message}: {_REMEDY}")
        return read

    def _letters_of(self, present: frozenset[int]) -> _Letters:
        found = self._known.get(present)
        if found is None:  # threads may find it at once
            if len(self._known) >= _KNOWN:
                self._known.clear()
            found = _Letters({self._special[id]: id for id in present}, self._others)
            self._known[present] = found
        return found

    def _read(self, text: str, special: Sequence[tuple[int, int, int]]) -> list[int]:
        pieces, done = [], 0
        for begin, end, id in special:
            pieces += [text[done:begin], self._alias[id]]
            done = end
        pieces.append(text[done:])
        [encoding] = self._reader.encode_batch_fast(["".join(pieces)], add_special_tokens=False)
        return [self._id.get(id, id) for id in encoding.ids]


class _Letters:
    """What a few special tokens are made of."""

    def __init__(self, ids: dict[str, int], others: list[str]) -> None:
        """`ids`: of the special tokens; `others`: further tokens, which may have one of these within them."""
        self.ids = ids
        around = [other for other in others if any(token in other for token in ids)]
        longest_first = sorted((*ids, *around), key=len, reverse=True)
        self.pattern = re.compile("|".join(map(re.escape, longest_first)))
        self.longest = max(map(len, ids))
        self.begins = tuple({token[:length] for token in ids for length in range(1, len(token))})
        self.ends = tuple({token[length:] for token in ids for length in range(1, len(token))})
        codes = {ord(letter) for token in ids for letter in token if not letter.isspace()}
        self.twin = {code: _TWINS + code for code in codes if code < _NO_TWINS_FROM}
        self.signs = {code: twin for code, twin in self.twin.items() if not re.match(r"\w", chr(code))}
        """The twins of those that are no letters of words."""
        self.back = {twin: code for code, twin in self.twin.items()}

    def have_inside(self, text: str) -> bool:
        """Whether a text is a part of one of them."""
        return 0 < len(text) < self.longest and any(text in token for token in self.ids)


class _Texts:
    """The texts of a client beside the special tokens of its prompt."""

    def __init__(self, given: ClientTexts, letters: _Letters) -> None:
        self._given, self._letters = given, letters
        everything = "\0".join(text for text, _ in given)
        self.whole = [token for token in letters.ids if token in everything]

    @property
    def have_any_whole(self) -> bool:
        """Whether one has a whole special token in it."""
        return bool(self.whole)

    @property
    def have_any_part(self) -> bool:
        """Whether one could become a special token by what the template writes beside it."""
        return any(
            self._letters.have_inside(text)
            or text.endswith(self._letters.begins)
            or text.startswith(self._letters.ends)
            for text in (text.strip() for text, _ in self._given)
        )

    def places(
        self, text: str, render: Callable[[ClientTexts], str], is_rewritten: bool
    ) -> Callable[[int, int], bool] | None:
        """Returns what tells whether something of a place in `text` is a client's; None if `render` does not
        show it. `is_rewritten`: the template may make a special token of a text that looks like none."""
        for rewrite in ([self._with_all_twins] if is_rewritten else []) + [self._with_twins]:
            twins = _rendered(render, self._given.rewritten(rewrite))
            if twins is not None and twins.translate(self._letters.back) == text:
                return partial(self._has_twin, twins)
        while (mark := f"{secrets.randbelow(10**24):024}") in text:
            pass
        marked = _rendered(
            render, self._given.rewritten(lambda each, is_name: self._marked(each, is_name, mark))
        )
        if marked is None:
            return None
        pieces = marked.split(mark)
        if "".join(pieces) != text:
            return None
        marks, place = [], 0
        for piece in pieces[:-1]:
            place += len(piece)
            marks.append(place)
        return lambda begin, end: bisect_left(marks, end) > bisect_right(marks, begin)

    def _has_twin(self, text: str, begin: int, end: int) -> bool:
        return any(ord(letter) in self._letters.back for letter in text[begin:end])

    def _with_all_twins(self, text: str, is_name: bool) -> str:
        is_known = is_name and text.isidentifier()  # perhaps to the template, under this name
        return self._with_twins(text, is_name) if is_known else text.translate(self._letters.twin)

    def _with_twins(self, text: str, _: bool) -> str:
        return text.translate(
            self._letters.twin if self._letters.have_inside(text.strip()) else self._letters.signs
        )

    def _marked(self, text: str, is_name: bool, mark: str) -> str:
        """Puts marks into all that is or may become a special token, behind its first letter."""
        core = text.strip()
        begin = text.find(core)
        places = {match.start() + 1 for match in self._letters.pattern.finditer(text)}
        places |= {begin + len(core) - len(each) + 1 for each in self._letters.begins if core.endswith(each)}
        places |= {begin + len(each) - 1 for each in self._letters.ends if core.startswith(each)}
        if not is_name and self._letters.have_inside(core):
            places.add(begin + 1)
        cuts = [0, *sorted(places), len(text)]
        return mark.join(text[one:other] for one, other in pairwise(cuts)) if places else text


def _rendered(render: Callable[[ClientTexts], str], texts: ClientTexts) -> str | None:
    try:
        return render(texts)
    except (TokenizerError, TypeError, ValueError, ArithmeticError, RecursionError):
        return None  # the template looks at the texts, and does not take these


def _rewritten(value: Any, rewrite: Rewrite) -> Any:
    if isinstance(value, str):
        return rewrite(value, False)
    if isinstance(value, Mapping):
        return {rewrite(name, True): _rewritten(each, rewrite) for name, each in value.items()}
    if isinstance(value, list):
        return [_rewritten(each, rewrite) for each in value]
    return value


def _texts(value: Any) -> Iterator[tuple[str, bool]]:
    left = [value]
    while left:
        each = left.pop()
        if isinstance(each, str):
            yield each, False
        elif isinstance(each, Mapping):
            yield from ((name, True) for name in each)
            left.extend(each.values())
        elif isinstance(each, list):
            left.extend(each)
