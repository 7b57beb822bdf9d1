"""How the tokens of a request are chosen and when it ends; the fields carry vLLM's names."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from ostinato.graphs.errors import OstinatoError
from ostinato.kernels.constants import GREEDY_BELOW
from ostinato.text.structured import StructuredOutputs

MAX_LOGPROBS = 20
"""The most alternatives per token that can be asked for."""


class RequestOutputKind(Enum):
    """What a stream of outputs shows each time."""

    CUMULATIVE = 0
    """All so far."""
    DELTA = 1
    """What is new."""
    FINAL_ONLY = 2
    """Nothing before the end."""


class RequestError(OstinatoError, ValueError):
    """A request cannot be served as it was asked. The engine goes on serving the others."""


def _check_number(name: str, value: object, low: float, high: float, rule: str) -> None:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or not math.isfinite(value) or not low <= value <= high:  # type: ignore[arg-type, operator]
        raise RequestError(f"{name} must be {rule}, not {value!r}")


def _check_integer(name: str, value: object, low: int, high: float, rule: str) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise RequestError(f"{name} must be {rule}, not {value!r}")


def _token_id(name: str, value: object) -> int:
    _check_integer(name, value, 0, 2**31 - 1, "a token id (an integer of at least 0)")
    return value  # type: ignore[return-value]


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Sampling parameters of a request. Each field's text is its help; `stop` and ids become tuples."""

    n: int = 1
    """Completions per prompt."""
    temperature: float = 1.0
    """Randomness: 0 takes the likeliest token, 1 samples the model's distribution."""
    top_p: float = 1.0
    """Sample among the likeliest tokens that together reach this probability; 1 allows all."""
    top_k: int = 0
    """Sample among this many likeliest tokens; 0 or -1 allows all."""
    min_p: float = 0.0
    """Drop tokens less likely than this share of the likeliest one; 0 drops none."""
    presence_penalty: float = 0.0
    """Lower (or raise, if negative) the logit of tokens that were generated already; -2 to 2."""
    frequency_penalty: float = 0.0
    """The same, for each time the token was generated; -2 to 2."""
    repetition_penalty: float = 1.0
    """Divide positive and multiply negative logits of tokens in prompt or output by this; above 0."""
    logit_bias: Mapping[int, float] | None = None
    """Added to the logits of these token ids; -100 to 100."""
    seed: int | None = None
    """Makes the draws repeatable: they depend on the seed and the position only."""
    stop: str | Sequence[str] | None = None
    """Strings that end the completion; they are not part of the text."""
    include_stop_str_in_output: bool = False
    """Keep the stop string at the end of the text."""
    stop_token_ids: Sequence[int] | None = None
    """Token ids that end the completion."""
    ignore_eos: bool = False
    """Go on after the model's end-of-sequence token."""
    max_tokens: int | None = 16
    """The most tokens of a completion; None leaves it to the model length."""
    min_tokens: int = 0
    """No end-of-sequence or stop token ends the completion before this many tokens."""
    logprobs: int | None = None
    """Return log probabilities of the sampled token and of this many likeliest ones."""
    prompt_logprobs: int | None = None
    """The same for the tokens of the prompt."""
    detokenize: bool = True
    """Turn the tokens into text; without it only token ids are returned."""
    skip_special_tokens: bool = True
    """Leave special tokens out of the text."""
    structured_outputs: StructuredOutputs | None = None
    """What the text must look like: a JSON schema, a regular expression, a grammar."""
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE

    def __post_init__(self) -> None:
        set_field = object.__setattr__
        stop = () if self.stop is None else (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
        set_field(self, "stop", stop)
        ids = tuple(_token_id("a stop token id", token) for token in self.stop_token_ids or ())
        set_field(self, "stop_token_ids", ids)
        self._check_distribution()
        if self.logit_bias is not None:
            set_field(self, "logit_bias", _checked_bias(self.logit_bias))
        self._check_ending()
        wanted = self.structured_outputs
        if wanted is not None and not isinstance(wanted, StructuredOutputs):
            raise RequestError(f"structured_outputs must be StructuredOutputs or None, not {wanted!r}")
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                _check_integer(name, getattr(self, name), 0, MAX_LOGPROBS, f"0 to {MAX_LOGPROBS} or None")

    def _check_distribution(self) -> None:
        _check_integer("n", self.n, 1, math.inf, "an integer of at least 1")
        _check_number("temperature", self.temperature, 0.0, math.inf, "a number of at least 0")
        _check_number("top_p", self.top_p, math.nextafter(0.0, 1.0), 1.0, "above 0 and at most 1")
        _check_integer("top_k", self.top_k, -1, math.inf, "an integer of at least 1, or 0 or -1 for all")
        _check_number("min_p", self.min_p, 0.0, 1.0, "from 0 to 1")
        _check_number("presence_penalty", self.presence_penalty, -2.0, 2.0, "from -2 to 2")
        _check_number("frequency_penalty", self.frequency_penalty, -2.0, 2.0, "from -2 to 2")
        smallest = math.nextafter(0.0, 1.0)
        _check_number("repetition_penalty", self.repetition_penalty, smallest, math.inf, "a number above 0")
        if self.seed is not None:
            _check_integer("seed", self.seed, -(2**63), 2**63 - 1, "a 64-bit integer or None")

    def _check_ending(self) -> None:
        for text in self.stop or ():
            if not isinstance(text, str) or not text:
                raise RequestError(f"a stop string must be a text that is not empty, not {text!r}")
        if self.stop and not self.detokenize:
            raise RequestError("stop strings are searched in the text: they need detokenize=True")
        if self.max_tokens is not None:
            _check_integer("max_tokens", self.max_tokens, 1, math.inf, "an integer of at least 1, or None")
        _check_integer("min_tokens", self.min_tokens, 0, 2**30, f"an integer from 0 to {2**30}")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(f"min_tokens ({self.min_tokens}) is above max_tokens ({self.max_tokens})")

    @property
    def is_greedy(self) -> bool:
        """Whether the likeliest token is always taken."""
        return self.temperature < GREEDY_BELOW

    @property
    def has_penalties(self) -> bool:
        """Whether earlier tokens change the logits."""
        return self.presence_penalty != 0.0 or self.frequency_penalty != 0.0 or self.repetition_penalty != 1.0


def _checked_bias(bias: Mapping[int, float]) -> dict[int, float]:
    if not isinstance(bias, Mapping):
        raise RequestError(f"logit_bias maps token ids to numbers, not {bias!r}")
    checked = {}
    for key, value in bias.items():
        # JSON has only text keys, so that is how the OpenAI API carries token ids.
        token = int(key) if isinstance(key, str) and key.isdecimal() else key
        _check_number(f"logit_bias of token {key}", value, -100.0, 100.0, "from -100 to 100")
        checked[_token_id("a key of logit_bias", token)] = float(value)
    return checked
