"""How the tokens of a request are chosen and when it ends; the names and their order are vLLM's."""

from __future__ import annotations

import copy
import math
import operator
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from enum import Enum
from itertools import repeat
from typing import Any

from ostinato.kernels.constants import GREEDY_BELOW
from ostinato.text.structured import StructuredOutputs

from .parameter_checks import (
    SMALLEST,
    RequestError,
    biases,
    check_flag,
    check_integer,
    check_number,
    listed,
    token_id,
    token_ids,
)
from .peer_parameters import GuidedDecodingParams, StructuredOutputsParams, takes_peer_names

__all__ = [
    "GREEDY_BELOW",
    "BeamSearchParams",
    "GuidedDecodingParams",
    "RequestError",
    "RequestOutputKind",
    "SamplingParams",
    "StructuredOutputs",
    "StructuredOutputsParams",
]

_SMALLEST = math.nextafter(0.0, 1.0)
_FLAGS = (
    "ignore_eos",
    "flat_logprobs",
    "detokenize",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "include_stop_str_in_output",
    "skip_reading_prefix_cache",
)


class RequestOutputKind(Enum):
    """What each output of a stream (`AsyncLLM.generate`) contains."""

    CUMULATIVE = 0
    """Everything so far."""
    DELTA = 1
    """What is new since the previous output."""
    FINAL_ONLY = 2
    """Everything, once, at the end."""


@takes_peer_names
@dataclass(slots=True)
class SamplingParams:
    """Sampling parameters of a request. Each field's docstring is its help text.

    They may be changed at any time: each request gets a copy, which is checked when the request is added.
    Fields that do not exist cannot be set.
    """

    n: int = 1
    """Completions per prompt."""
    presence_penalty: float = 0.0
    """Subtracted from the logits of tokens that were already generated; -2 to 2."""
    frequency_penalty: float = 0.0
    """Subtracted from the logit of a token once for each time it was generated; -2 to 2."""
    repetition_penalty: float = 1.0
    """Logits of tokens in the prompt or output are divided by this if positive and multiplied by it if
    negative; above 0."""
    temperature: float = 1.0
    """Randomness: 0 always takes the most likely token, 1 samples from the model's distribution."""
    top_p: float = 1.0
    """Sample from the most likely tokens that together reach this probability; 1 allows all tokens."""
    top_k: int = 0
    """Sample from this many of the most likely tokens; 0 or -1 allows all tokens."""
    min_p: float = 0.0
    """Exclude tokens whose probability is below this fraction of the most likely token's; 0 excludes none."""
    seed: int | None = None
    """Makes sampling repeatable: draws depend only on the seed and the position. -1: no seed."""
    stop: str | Sequence[str] | None = None
    """Strings that end the completion; they are not included in the text."""
    stop_token_ids: Sequence[int] | None = None
    """Token ids that end the completion."""
    ignore_eos: bool = False
    """Continue after the model's end-of-sequence token."""
    max_tokens: int | None = 16
    """Maximum number of tokens in a completion; None: as many as the model length allows."""
    min_tokens: int = 0
    """Minimum number of tokens in a completion: before that, no end-of-sequence token, stop token or stop
    string ends it."""
    logprobs: int | None = None
    """Return log probabilities of the sampled token and of this many of the most likely ones; -1: of all."""
    prompt_logprobs: int | None = None
    """The same for the tokens of the prompt."""
    logprob_token_ids: Sequence[int] | None = None
    """Return log probabilities of the sampled token and of these tokens, not of the most likely ones."""
    flat_logprobs: bool = False
    """No effect: log probabilities are always a list with a dictionary per token."""
    detokenize: bool = True
    """Decode the tokens into text; if off, only token ids are returned."""
    skip_special_tokens: bool = True
    """Leave special tokens out of the text."""
    spaces_between_special_tokens: bool = True
    """No effect: special tokens appear in the text as they are, without added spaces."""
    include_stop_str_in_output: bool = False
    """Keep the stop string at the end of the text."""
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    """What each output of a stream contains: everything so far, only what is new, or everything once at the
    end."""
    _: KW_ONLY
    stream_interval: int | None = None
    """Number of new tokens per output of a stream, after the first output; default: as they come."""
    structured_outputs: StructuredOutputs | None = None
    """What the text must match: a JSON schema, a regular expression, a grammar or a list of choices."""
    logit_bias: Mapping[int, float] | None = None
    """Added to the logits of these token ids; -100 to 100."""
    allowed_token_ids: Sequence[int] | None = None
    """Only these token ids may be generated."""
    bad_words: Sequence[str | Sequence[int]] | None = None
    """Words, as text or as token ids, that must not be generated: the last token of a word is forbidden after
    the others."""
    logits_processors: Any = None
    """Functions of (token ids so far, logits) or (prompt ids, token ids so far, logits) that return the
    logits to sample from. With them the request waits for the device in every step."""
    truncate_prompt_tokens: int | None = None
    """Keep only this many tokens at the end of the prompt; -1: as many as leave room for the answer."""
    skip_reading_prefix_cache: bool = False
    """Compute the whole prompt, even if parts of it are cached."""
    extra_args: dict[str, Any] | None = None
    """Arbitrary values of the caller, kept with the request; Ostinato itself does not read them."""

    def __post_init__(self) -> None:
        self.stop = [self.stop] if isinstance(self.stop, str) else listed("stop", self.stop, "strings")
        self.stop_token_ids = token_ids("stop_token_ids", "a stop token id", self.stop_token_ids)
        self.seed = None if self.seed == -1 else self.seed
        for name in _FLAGS:
            check_flag(name, getattr(self, name))
        self._check_distribution()
        self._check_ending()
        self._check_told()
        self._check_tokens()
        if self.structured_outputs is not None and not isinstance(self.structured_outputs, StructuredOutputs):
            raise RequestError(
                f"structured_outputs must be StructuredOutputsParams or None, not {self.structured_outputs!r}"
            )
        if self.extra_args is not None and not isinstance(self.extra_args, dict):
            raise RequestError(f"extra_args must be a dictionary or None, not {self.extra_args!r}")

    def _check_distribution(self) -> None:
        check_integer("n", self.n, 1, math.inf, "an integer of at least 1")
        check_number("temperature", self.temperature, 0.0, math.inf, "a number of at least 0")
        check_number("top_p", self.top_p, _SMALLEST, 1.0, "above 0 and at most 1")
        check_integer("top_k", self.top_k, -1, math.inf, "an integer of at least 1, or 0 or -1 for all")
        check_number("min_p", self.min_p, 0.0, 1.0, "from 0 to 1")
        check_number("presence_penalty", self.presence_penalty, -2.0, 2.0, "from -2 to 2")
        check_number("frequency_penalty", self.frequency_penalty, -2.0, 2.0, "from -2 to 2")
        check_number("repetition_penalty", self.repetition_penalty, SMALLEST, math.inf, "a number above 0")
        if self.seed is not None:
            check_integer("seed", self.seed, -(2**63), 2**63 - 1, "a 64-bit integer or None")

    def _check_ending(self) -> None:
        for text in self.stop or ():
            if not isinstance(text, str) or not text:
                raise RequestError(f"a stop string must be a non-empty string, not {text!r}")
        if self.stop and not self.detokenize:
            raise RequestError("stop strings are searched for in the text: they need detokenize=True")
        if self.max_tokens is not None:
            check_integer("max_tokens", self.max_tokens, 1, math.inf, "an integer of at least 1, or None")
        check_integer("min_tokens", self.min_tokens, 0, 2**30, f"an integer from 0 to {2**30}")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(f"min_tokens ({self.min_tokens}) is above max_tokens ({self.max_tokens})")
        cut = self.truncate_prompt_tokens
        if cut is not None and cut != -1:
            check_integer("truncate_prompt_tokens", cut, 1, math.inf, "at least 1, or -1, or None")

    def _check_told(self) -> None:
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is True:
                setattr(self, name, 1)
            if getattr(self, name) is not None:
                check_integer(name, getattr(self, name), -1, math.inf, "at least 0, -1 for all, or None")
        if self.logprob_token_ids is not None:
            named = token_ids("logprob_token_ids", "an id of logprob_token_ids", self.logprob_token_ids)
            self.logprob_token_ids = named
            if self.logprobs not in (None, len(named)):
                raise RequestError(
                    f"logprob_token_ids has {len(named)} ids: logprobs must be {len(named)} or None, "
                    f"not {self.logprobs}"
                )
        if not isinstance(self.output_kind, RequestOutputKind):
            raise RequestError(f"output_kind must be a RequestOutputKind, not {self.output_kind!r}")
        if self.stream_interval is not None:
            check_integer("stream_interval", self.stream_interval, 1, math.inf, "at least 1, or None")

    def _check_tokens(self) -> None:
        if self.logit_bias is not None:
            self.logit_bias = biases(self.logit_bias)
        if self.allowed_token_ids is not None:
            allowed = token_ids("allowed_token_ids", "an id of allowed_token_ids", self.allowed_token_ids)
            if not allowed:
                raise RequestError("allowed_token_ids is empty and allows no token; None allows all")
            self.allowed_token_ids = allowed
        if self.bad_words is not None:
            self.bad_words = [_bad_word(word) for word in listed("bad_words", self.bad_words, "strings")]
        if self.logits_processors is not None:
            self.logits_processors = listed("logits_processors", self.logits_processors, "functions")
            for given in self.logits_processors:
                if not callable(given):
                    raise RequestError(f"logits_processors must be functions, not {given!r}")

    @property
    def guided_decoding(self) -> StructuredOutputs | None:
        """The older name of `structured_outputs`."""
        return self.structured_outputs

    @guided_decoding.setter
    def guided_decoding(self, wanted: StructuredOutputs | None) -> None:
        self.structured_outputs = wanted

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is always taken."""
        return self.temperature < GREEDY_BELOW

    @property
    def has_penalties(self) -> bool:
        """Whether earlier tokens change the logits."""
        return self.presence_penalty != 0.0 or self.frequency_penalty != 0.0 or self.repetition_penalty != 1.0

    @property
    def wants_logprobs(self) -> bool:
        """Whether log probabilities are returned."""
        return self.logprobs is not None or self.logprob_token_ids is not None

    def clone(self) -> SamplingParams:
        """A copy that shares only the functions with this one."""
        same = {id(each): each for each in self.logits_processors or ()}
        return copy.deepcopy(self, same)

    def verified(self, **changes: Any) -> SamplingParams:
        """A copy for one request, checked as it is now. RequestError if a value is invalid."""
        if changes or type(self) is not SamplingParams:
            return replace(self, **changes)
        made = self._copied()
        if _last_checked.are(self):
            made.stop, made.stop_token_ids = [], []
        else:
            made.__post_init__()
            _last_checked.note(made)
        return made

    def _copied(self) -> SamplingParams:
        """Like `copy.copy`, in a tenth of the time."""
        if type(self) is not SamplingParams:
            return copy.copy(self)
        made = object.__new__(SamplingParams)
        deque(map(setattr, repeat(made), SamplingParams.__slots__, _values_of(self)), maxlen=0)
        return made

    def seeded(self, number: int) -> SamplingParams:
        """Parameters for completion `number` of a prompt; number 0 is what n=1 would give."""
        made = self._copied()
        made.n = 1
        if self.seed is not None:
            # Wraps around within 64 bits, and skips -1, which means no seed.
            seed = (self.seed + number + 2**63) % 2**64 - 2**63
            made.seed = 2**63 - 1 if seed == -1 else seed
        return made

    @staticmethod
    def from_optional(**given: Any) -> SamplingParams:
        """Like the constructor, but None means the default, except for max_tokens, where it is a value."""
        kept = {name: value for name, value in given.items() if value is not None or name == "max_tokens"}
        return SamplingParams(**kept)


_values_of = operator.attrgetter(*SamplingParams.__slots__)
_LISTS = ("stop", "stop_token_ids")
"""Fields of which each request gets its own copy of the list."""
_simple_values_of = operator.attrgetter(*(name for name in SamplingParams.__slots__ if name not in _LISTS))
_UNCHANGING = {type(None), bool, int, float, RequestOutputKind}


class _LastChecked:
    """The values of the last parameters that passed the checks, if nothing in them can have changed since."""

    def __init__(self) -> None:
        self._values: tuple[Any, ...] = ()

    def note(self, params: SamplingParams) -> None:
        """Remember parameters that passed the checks."""
        values = _simple_values_of(params)
        self._values = values if _UNCHANGING.issuperset(map(type, values)) else ()

    def are(self, params: SamplingParams) -> bool:
        """Whether these are the same objects, without stop strings or stop tokens."""
        values = self._values  # another thread may replace them meanwhile
        if params.stop != [] or params.stop_token_ids != [] or not values:
            return False
        return all(map(operator.is_, _simple_values_of(params), values))


_last_checked = _LastChecked()


@dataclass
class BeamSearchParams:
    """Parameters of a beam search."""

    beam_width: int
    """Number of beams kept in every step and returned at the end."""
    max_tokens: int
    """Maximum number of tokens in a beam."""
    ignore_eos: bool = False
    """Continue after the model's end-of-sequence token."""
    temperature: float = 0.0
    """No effect, for compatibility with vLLM: beams are ranked by the model's own log probabilities."""
    length_penalty: float = 1.0
    """Sums of log probabilities are divided by the length to this power."""
    include_stop_str_in_output: bool = False
    """Keep the end-of-sequence token in the text."""
    structured_outputs: StructuredOutputs | None = None
    """What the text must match."""

    def __post_init__(self) -> None:
        check_integer("beam_width", self.beam_width, 1, math.inf, "an integer of at least 1")
        check_integer("max_tokens", self.max_tokens, 1, math.inf, "an integer of at least 1")
        check_number("temperature", self.temperature, 0.0, math.inf, "a number of at least 0")
        check_number("length_penalty", self.length_penalty, -math.inf, math.inf, "a number")
        for name in ("ignore_eos", "include_stop_str_in_output"):
            check_flag(name, getattr(self, name))


def _bad_word(word: object) -> str | list[int]:
    if isinstance(word, str):
        if not word:
            raise RequestError("bad_words must not contain an empty string")
        return word
    ids = [token_id("an id of bad_words", each) for each in listed("bad_words", word, "token ids")]
    if not ids:
        raise RequestError("bad_words must not contain an empty list")
    return ids
