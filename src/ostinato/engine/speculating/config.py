"""The options of speculation: vLLM's keys, each checked by name. Anything not supported is refused."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from os import PathLike
from typing import Any, cast

from ostinato.graphs.errors import ConfigError

METHODS = ("ngram", "draft_model", "eagle", "eagle3")
MAX_SPECULATIVE_TOKENS = 15
"""One attention step takes up to 16 tokens of a request: the drafts, and the token before them."""
DEFAULT_LOOKUP = 5
MAX_LOOKUP = 64
"""Runs are compared token by token, in unrolled code."""

_OTHER_NAMES = {"ngram_gpu": "ngram", "[ngram]": "ngram"}
_AS_IT_IS: dict[str, tuple[Any, ...]] = {
    "draft_tensor_parallel_size": (1,),
    "draft_sample_method": ("greedy",),
    "quantization": (),
    "enforce_eager": (False,),
    "attention_backend": ("auto",),
    "kv_cache_dtype": ("auto",),
    "code_revision": (),
    "parallel_drafting": (False,),
    "use_heterogeneous_vocab": (False,),
    "use_local_argmax_reduction": (True, False),
    "disable_padded_drafter_batch": (False,),
    "enable_adaptive_verification": (False,),
    "moe_backend": ("auto",),
}
"""vLLM's keys that cannot change anything here, with the values that describe what happens anyway."""
_WHY_NOT = {
    "max_model_len": "drafts serve requests of every length",
    "tensor_parallel_size": "one engine uses one GPU",
}


@dataclass(frozen=True)
class SpeculativeConfig:
    """How tokens are drafted, how many, and when."""

    method: str
    """ngram, draft_model, eagle, eagle3."""
    num_speculative_tokens: int
    """The most drafts in one step, K."""
    model: str | None = None
    """The draft model: a directory or a hub name; a GGUF file for draft_model. None for ngram."""
    revision: str | None = None
    """Branch, tag or commit of a draft model on the hub."""
    load_format: str | None = None
    """auto or dummy; None: as for the target."""
    prompt_lookup_min: int = DEFAULT_LOOKUP
    """The shortest run of tokens that ngram looks up."""
    prompt_lookup_max: int = DEFAULT_LOOKUP
    """The longest, tried first."""
    schedule: tuple[tuple[int, int, int], ...] | None = None
    """(first, last, k): k drafts for batches of first to last requests; None: acceptance and costs decide."""
    synthetic_rates: tuple[float, ...] | None = None
    """By position: how often drafts up to it are accepted, whatever they are; None: the model decides."""
    disable_adaptive: bool = False
    """Always draft num_speculative_tokens, whatever it costs or gains."""
    max_speculative_requests: int = 64
    """Larger batches decode one token a step: graphs for several tokens per request end at this size."""

    @classmethod
    def parse(cls, given: Mapping[str, Any]) -> SpeculativeConfig:
        """Parse vLLM's mapping. Raises ConfigError that names the unsupported key."""
        left = {key: value for key, value in given.items() if value is not None}
        method = _method(left)
        most = _whole(left, "num_speculative_tokens", least=1, most=MAX_SPECULATIVE_TOKENS)
        if most is None:
            raise ConfigError("speculative_config: num_speculative_tokens is missing")
        lookup = _lookup(left, method)
        if left.get("disable_adaptive") and "num_speculative_tokens_per_batch_size" in left:
            raise ConfigError(
                "speculative_config: num_speculative_tokens_per_batch_size sets the number of drafts, and "
                "disable_adaptive contradicts it: leave one of them out"
            )
        config = cls(
            method=method,
            num_speculative_tokens=most,
            model=_model(left, method),
            revision=_text(left, "revision"),
            load_format=_load_format(left),
            prompt_lookup_min=lookup[0],
            prompt_lookup_max=lookup[1],
            schedule=_schedule(left, most),
            synthetic_rates=_synthetic_rates(left, most),
            disable_adaptive=_flag(left, "disable_adaptive"),
            max_speculative_requests=_whole(left, "max_speculative_requests", least=1) or 64,
        )
        _refuse_others(left)
        return config

    def scheduled(self, num_requests: int) -> int | None:
        """How many drafts the schedule gives each request of a batch; None: there is no schedule."""
        if self.schedule is None:
            return None
        # Sizes between two ranges, or after the last, belong to the range before them.
        begun = [drafts for first, _, drafts in self.schedule if first <= num_requests]
        return min(begun[-1], self.num_speculative_tokens)


def _method(left: dict[str, Any]) -> str:
    given, model = left.pop("method", None), left.get("model")
    if given is None:
        if model is None:
            raise ConfigError(f"speculative_config: method is missing: use one of {', '.join(METHODS)}")
        name = str(model).lower()
        if name in _OTHER_NAMES or name == "ngram":
            del left["model"]
            return "ngram"
        return "eagle3" if "eagle3" in name else "eagle" if "eagle-" in name else "draft_model"
    method = _OTHER_NAMES.get(given, given) if isinstance(given, str) else given
    if method not in METHODS:
        raise ConfigError(
            f"speculative_config: method {given!r} is not supported: use one of {', '.join(METHODS)}"
        )
    return cast(str, method)


def _model(left: dict[str, Any], method: str) -> str | None:
    if isinstance(left.get("model"), PathLike):
        left["model"] = str(left["model"])
    model = _text(left, "model")
    if method == "ngram":
        if model is not None and model not in ("ngram", *_OTHER_NAMES):
            raise ConfigError(f"speculative_config: ngram uses no model: leave model out, not {model!r}")
        for key in ("revision", "draft_load_config"):
            if key in left:
                raise ConfigError(f"speculative_config: ngram uses no model: leave {key} out")
        return None
    if not model:
        raise ConfigError(f"speculative_config: model is missing: {method} needs a draft model")
    return model


def _lookup(left: dict[str, Any], method: str) -> tuple[int, int]:
    shortest = _whole(left, "prompt_lookup_min", least=1, most=MAX_LOOKUP)
    longest = _whole(left, "prompt_lookup_max", least=1, most=MAX_LOOKUP)
    if method != "ngram":
        if shortest is not None or longest is not None:
            raise ConfigError(
                f"speculative_config: prompt_lookup_min and _max are only for ngram, not {method}"
            )
        return DEFAULT_LOOKUP, DEFAULT_LOOKUP
    shortest, longest = shortest or longest or DEFAULT_LOOKUP, longest or shortest or DEFAULT_LOOKUP
    if shortest > longest:
        raise ConfigError(
            f"speculative_config: prompt_lookup_min ({shortest}) is above prompt_lookup_max ({longest})"
        )
    return shortest, longest


def _load_format(left: dict[str, Any]) -> str | None:
    group = left.pop("draft_load_config", None)
    if group is None:
        return None
    if not isinstance(group, Mapping) or set(group) - {"load_format"}:
        raise ConfigError(
            f"speculative_config: draft_load_config must contain load_format only, not {group!r}"
        )
    found = group.get("load_format", "auto")
    if found not in ("auto", "safetensors", "dummy"):
        raise ConfigError(
            f"speculative_config: load_format of the draft must be auto, safetensors or dummy, not {found!r}"
        )
    return "dummy" if found == "dummy" else "auto"


def _schedule(left: dict[str, Any], most: int) -> tuple[tuple[int, int, int], ...] | None:
    name = "num_speculative_tokens_per_batch_size"
    given = left.pop(name, None)
    if given is None:
        return None
    wrong = f"speculative_config: {name} must be a list of [first, last, drafts] that starts at 1, not "
    if not isinstance(given, Sequence) or isinstance(given, str) or not given:
        raise ConfigError(f"{wrong}{given!r}")
    rows = []
    for entry in given:
        if not isinstance(entry, Sequence) or len(entry) != 3 or not all(type(part) is int for part in entry):
            raise ConfigError(f"{wrong}{entry!r}")
        first, last, drafts = entry
        if not 1 <= first <= last or not 0 <= drafts <= most:
            raise ConfigError(
                f"speculative_config: {name}: {list(entry)} must have 1 <= first <= last, and from 0 to "
                f"num_speculative_tokens ({most}) drafts"
            )
        rows.append((first, last, drafts))
    rows.sort()
    if rows[0][0] != 1:
        raise ConfigError(f"speculative_config: {name} must begin at 1, not at {rows[0][0]}")
    for before, after in pairwise(rows):
        if after[0] <= before[1]:
            raise ConfigError(f"speculative_config: {name}: {list(before)} and {list(after)} overlap")
    return tuple(rows)


def _synthetic_rates(left: dict[str, Any], most: int) -> tuple[float, ...] | None:
    how = left.pop("rejection_sample_method", "standard")
    rates = left.pop("synthetic_acceptance_rates", None)
    length = left.pop("synthetic_acceptance_length", None)
    if how == "standard":
        if rates is not None or length is not None:
            raise ConfigError(
                "speculative_config: synthetic_acceptance_rates and _length need "
                "rejection_sample_method 'synthetic'"
            )
        return None
    if how != "synthetic":
        raise ConfigError(
            f"speculative_config: rejection_sample_method {how!r} is not supported: use standard or synthetic"
        )
    if (rates is None) == (length is None):
        raise ConfigError(
            "speculative_config: synthetic acceptance needs either synthetic_acceptance_rates or "
            "synthetic_acceptance_length"
        )
    return _given_rates(rates, most) if rates is not None else _rates_of(length, most)


def _given_rates(rates: Any, most: int) -> tuple[float, ...]:
    is_list = isinstance(rates, Sequence) and not isinstance(rates, str) and len(rates) == most
    if not is_list or not all(_is_number(rate) and 0 <= rate <= 1 for rate in rates):
        raise ConfigError(
            f"speculative_config: synthetic_acceptance_rates must be {most} numbers from 0 to 1, one for "
            f"each draft, not {rates!r}"
        )
    if any(after > before for before, after in pairwise(rates)):
        raise ConfigError(
            f"speculative_config: synthetic_acceptance_rates must not rise, as {list(rates)} do: each "
            "counts all drafts up to its position"
        )
    return tuple(float(rate) for rate in rates)


def _rates_of(length: Any, most: int) -> tuple[float, ...]:
    """Rates whose sum is length - 1, with the least variance: 1 for whole drafts, the rest for one more."""
    if not _is_number(length) or not 1 <= length <= most + 1:
        raise ConfigError(
            f"speculative_config: synthetic_acceptance_length must be from 1 to {most + 1}, not {length!r}"
        )
    return tuple(min(1.0, max(0.0, length - 1 - place)) for place in range(most))


def _refuse_others(left: dict[str, Any]) -> None:
    for key, value in left.items():
        if key in _AS_IT_IS:
            known = _AS_IT_IS[key]
            # True equals 1 but means something else.
            if not any(type(value) is type(one) and value == one for one in known):
                only = " or ".join(map(repr, known)) or "left out"
                raise ConfigError(f"speculative_config: {key} can only be {only}, not {value!r}")
        elif key in _WHY_NOT:
            raise ConfigError(f"speculative_config: {key} is not supported: {_WHY_NOT[key]}")
        else:
            raise ConfigError(f"speculative_config: unknown key {key!r}")


def _whole(left: dict[str, Any], key: str, *, least: int, most: int | None = None) -> int | None:
    value = left.pop(key, None)
    if value is None:
        return None
    if type(value) is not int or value < least or (most is not None and value > most):
        limits = f"at least {least}" if most is None else f"from {least} to {most}"
        raise ConfigError(f"speculative_config: {key} must be an integer, {limits}, not {value!r}")
    return value


def _flag(left: dict[str, Any], key: str) -> bool:
    value = left.pop(key, False)
    if not isinstance(value, bool):
        raise ConfigError(f"speculative_config: {key} must be true or false, not {value!r}")
    return value


def _text(left: dict[str, Any], key: str) -> str | None:
    value = left.pop(key, None)
    if value is not None and not isinstance(value, str):
        raise ConfigError(f"speculative_config: {key} must be a string, not {value!r}")
    return value


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def draft_tiers(config: SpeculativeConfig) -> tuple[int, ...]:
    """In rising order; without 0, which uses the plain graphs."""
    most = config.num_speculative_tokens
    if config.schedule is not None:
        return tuple(sorted({min(drafts, most) for _, _, drafts in config.schedule} - {0}))
    if config.disable_adaptive:
        return (most,)
    powers = [1 << power for power in range(most.bit_length()) if 1 << power < most]
    return (*powers, most)
