"""The subject of a measurement: a model with engine options, and how an engine for a workload is started."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ostinato.engine.llm import LLM
from ostinato.engine.resolved_config import ResolvedConfig, resolve
from ostinato.engine.vllm_api.llm_options import engine_config
from ostinato.kernels.attention.batch import PAGE_SIZE
from ostinato.models.config import ModelConfig
from ostinato.models.default_model import DEFAULT_MODEL_NAME
from ostinato.models.errors import DownloadError, ModelError
from ostinato.models.locate import locate_model

from ..tools.results import BenchError
from .workload import Workload

WITHOUT_GRAPHS: Mapping[str, Any] = {
    "cuda_graph_mode": "none",
    "cuda_graph_bs": None,
    "cuda_graph_max_bs": None,
    "cudagraph_capture_sizes": None,
    "max_cudagraph_capture_size": None,
    "cuda_graph_ladder": "auto",
    "batch_invariant": False,
}
"""Keywords of `LLM` for an engine without graphs, whatever other graph options are given."""

_CPU_LENGTH_STEP = 64


@dataclass(frozen=True)
class Subject:
    """A model and the engine options given by a user; nothing is loaded before `start`."""

    options: Mapping[str, Any]
    """Keywords of `LLM`, including `model`."""
    name: str
    directory: Path
    shape: ModelConfig
    config: ResolvedConfig
    """The options as resolved on this machine."""

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> Subject:
        """Find the model. A directory with only a `config.json` gets random weights."""
        model = options.get("model")
        try:
            directory = locate_model(model)
            shape = ModelConfig.load(directory)
        except (ModelError, DownloadError) as error:
            raise BenchError(str(error)) from error
        if not any(directory.glob("*.safetensors")):
            options = {"load_format": "dummy", **options}
        asked = {key: value for key, value in options.items() if key != "model"}
        config = resolve(
            engine_config(model, asked), shape.max_position_embeddings, getattr(torch, shape.dtype)
        )
        name = DEFAULT_MODEL_NAME if model is None else directory.resolve().name
        return cls(options, name, directory, shape, config)

    @property
    def has_random_weights(self) -> bool:
        """Whether there is no checkpoint."""
        return self.options.get("load_format") == "dummy"

    @property
    def on_gpu(self) -> bool:
        """Whether it runs on a GPU."""
        return self.config.device.type == "cuda"

    @property
    def dtype_name(self) -> str:
        """The type of weights and KV cache."""
        return str(self.config.dtype).removeprefix("torch.")

    def start(self, batch: int, length: int, **changes: Any) -> LLM:
        """An engine for `batch` requests of at most `length` tokens, without a prefix cache.

        The user's options are kept; `changes` take precedence over everything.
        """
        fitting: dict[str, Any] = {"enable_prefix_caching": False}
        if not self.on_gpu:
            # A CPU captures decode graphs by context length: none longer than needed.
            fitting["max_model_len"] = min(
                -(-length // _CPU_LENGTH_STEP) * _CPU_LENGTH_STEP, self.shape.max_position_embeddings
            )
            fitting["max_running_requests"] = batch
        else:
            if length > self.config.max_model_len:
                fitting["max_model_len"] = length
            if batch > self.config.max_running_requests:
                fitting["max_running_requests"] = batch
        options = {**fitting, **self.options, **changes}
        return LLM(options.pop("model", None), **options)

    def start_reference(self, workload: Workload) -> LLM:
        """The same engine without graphs, just large enough for `workload` and one more token."""
        length = workload.longest + 1
        pages = len(workload) * (-(-length // PAGE_SIZE) + 1) + 1
        return self.start(len(workload), length, **WITHOUT_GRAPHS, num_pages=pages)

    def described(self) -> dict[str, Any]:
        """A description for the head of a result."""
        given = {key: value for key, value in self.options.items() if key not in ("model", "load_format")}
        return {
            "name": self.name,
            "weights": "random" if self.has_random_weights else "checkpoint",
            "dtype": self.dtype_name,
            "device": self.config.device.type,
            "options": given,
        }
