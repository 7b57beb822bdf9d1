"""Keywords of `LLM`, in Ostinato's, vLLM's or SGLang's names, sorted into the engine's and `LLM`'s own."""

from __future__ import annotations

import dataclasses
import difflib
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ostinato.graphs import ConfigError
from ostinato.text.chat_template import template_source
from ostinato.text.errors import TokenizerError

from ..config import EngineConfig
from ..delivery.pooling import POOLINGS
from ..peer_options.translation import translated


@dataclass(frozen=True)
class LLMOptions:
    """Options of an `LLM` that do not concern its engine."""

    chat_template: str | None = None
    """A file with a chat template, or the template itself, for `chat`; default: the model's own."""
    served_model_name: str | None = None
    """The model's name in `get_metrics`; default: the name of its directory."""
    pooling: str | None = None
    """Which state `embed` takes for a prompt: that of its last token, or the mean of all. Default: as
    sentence-transformers saved it with the model, otherwise the last."""
    profile_dir: str | None = None
    """Folder for the traces of `start_profile`; default: VLLM_TORCH_PROFILER_DIR, otherwise profiles."""
    profile_delay: int = 0
    """Number of steps after `start_profile` that are not recorded."""
    profile_steps: int = 0
    """Number of recorded steps; 0: all until `stop_profile`."""

    def __post_init__(self) -> None:
        if self.pooling is not None and self.pooling not in POOLINGS:
            raise ConfigError(f"unknown pooling {self.pooling!r}: use {' or '.join(POOLINGS)}")
        for name in ("profile_delay", "profile_steps"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 0:
                raise ConfigError(f"{name} must be an integer of at least 0, not {value!r}")
        for name in ("chat_template", "served_model_name", "profile_dir"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, str | Path):
                raise ConfigError(f"{name} must be a string, not {value!r}")

    @property
    def template(self) -> str | None:
        """The source of `chat_template`. Raises ConfigError if there is none."""
        if self.chat_template is None:
            return None
        try:
            return template_source(str(self.chat_template))
        except TokenizerError as error:
            raise ConfigError(f"chat_template: {error}") from error

    def trace_file(self, prefix: str | None) -> str:
        """The file of the next profile."""
        folder = self.profile_dir or os.environ.get("VLLM_TORCH_PROFILER_DIR") or "profiles"
        name = f"{prefix}-" if prefix else ""
        stamp = f"{time.strftime('%Y%m%d-%H%M%S')}-{time.monotonic_ns() % 10**6:06}"
        return str(Path(folder) / f"{name}{stamp}.pt.trace.json.gz")


def llm_options(model: str | Path | None, options: Mapping[str, Any]) -> tuple[EngineConfig, LLMOptions]:
    """Both configurations from keywords. Raises ConfigError for unknown and unsupported ones."""
    given = options if model is None else {"model": model, **options}
    ours = translated({name: _as_written(value) for name, value in given.items()})
    if os.environ.get("VLLM_BATCH_INVARIANT") == "1":  # vLLM's way to request it
        ours.setdefault("batch_invariant", True)
    own = {entry.name for entry in dataclasses.fields(LLMOptions)}
    names = [entry.name for entry in dataclasses.fields(EngineConfig)]
    for name in ours:
        if name not in names and name not in own:
            near = difflib.get_close_matches(name, [*names, *own], n=1)
            advice = f"did you mean {near[0]}?" if near else f"use one of {', '.join(names)}"
            raise ConfigError(f"unknown option {name!r}: {advice}")
    lists = {name: tuple(value) for name, value in ours.items() if isinstance(value, list)}
    for_engine = {name: value for name, value in {**ours, **lists}.items() if name in names}
    for_llm = LLMOptions(**{name: value for name, value in ours.items() if name in own})
    return EngineConfig(**for_engine), for_llm


def _as_written(value: Any) -> Any:
    """Paths, and torch's types and devices, as they are written on a command line; without loading torch."""
    is_torchs = type(value).__module__ == "torch" and type(value).__name__ in ("dtype", "device")
    return str(value).removeprefix("torch.") if is_torchs or isinstance(value, Path) else value


def engine_config(model: str | None, options: Mapping[str, Any]) -> EngineConfig:
    """Only the engine's part of them."""
    return llm_options(model, options)[0]
