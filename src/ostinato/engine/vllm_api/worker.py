"""vLLM's worker, which trainers extend (`worker_extension_cls`) and call (`collective_rpc`).

There is one, in the engine's process. It has what trainers' classes use: the model with `load_weights`, its
parameters, the configuration, the device. Writing weights works as in `LLM.update_weights`: all or none.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from ostinato.graphs import ConfigError

from ..parameters.sampling_params import RequestError
from ..text_engine import TextEngine
from ..weight_sync.trainer_link import Apply, TrainerLink, done_here
from .engine_view import ModelView, VllmConfigView


class WorkerModel(nn.Module):
    """`model_runner.model`: the weights under vLLM's names, to read or replace; it cannot run."""

    def __init__(self, engine: TextEngine, apply: Apply) -> None:
        super().__init__()
        self._engine, self._write = engine, apply
        self.is_lent = False
        """Whether a caller has got the parameters themselves, and may write to them in any call."""

    @property
    def config(self) -> Any:
        """The fields of config.json."""
        return ModelView(self._engine).hf_config

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Write weights, by their names in the checkpoint, all or none; returns the names that were
        written."""
        listed = weights if isinstance(weights, Iterator) else list(weights)
        return set(self._write(listed, None).names)

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """All parameters, fused as kernels need them. Write to them only between two steps: inside of
        `collective_rpc` or `apply_model`."""
        self._engine.core.sleeper.refuse_without_weights()
        self.is_lent = True
        front = f"{prefix}." if prefix else ""
        for name, parameter in self._engine.core.loaded.model.named_parameters(recurse=recurse):
            is_outside = name.startswith(("lm_head.", "score."))
            yield f"{front}{name if is_outside else f'model.{name}'}", parameter

    def state_dict(self, *_: Any, **__: Any) -> dict[str, Tensor]:  # type: ignore[override]
        """The same, without gradients."""
        return {name: parameter.detach() for name, parameter in self.named_parameters()}

    def forward(self, *_: Any, **__: Any) -> None:
        """Refused: it cannot run."""
        raise RequestError("a worker's model cannot be run: use generate or embed")

    def extra_repr(self) -> str:
        """A description for `print`."""
        return self._engine.core.loaded.model.config.architecture

    def load_state_dict(self, *_: Any, **__: Any) -> Any:
        """Refused, as is everything below: in a module without layers it would silently do nothing."""
        raise RequestError("a worker's model cannot load a state dict: use load_weights")

    def named_modules(self, *_: Any, **__: Any) -> Any:
        """Refused."""
        raise RequestError("a worker's model has no layers, only weights: use named_parameters")

    def apply(self, *_: Any, **__: Any) -> Any:
        """Refused."""
        return self.named_modules()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> WorkerModel:
        runner = self._engine.core.config
        as_it_is = torch.empty(0, dtype=runner.dtype, device=runner.device)
        made = fn(as_it_is)
        if (made.dtype, made.device) != (as_it_is.dtype, as_it_is.device):
            raise RequestError(f"a worker's model stays {runner.dtype} on {runner.device}, as graphs have it")
        return self

    def _refuse_hooks(self, *_: Any, **__: Any) -> Any:
        """Refused."""
        raise RequestError("a worker's model cannot be run, so it would call no hook")

    register_forward_hook = register_forward_pre_hook = _refuse_hooks
    register_full_backward_hook = register_full_backward_pre_hook = _refuse_hooks


class WorkerRunner:
    """`self.model_runner`."""

    def __init__(self, engine: TextEngine, model: WorkerModel, apply: Apply) -> None:
        self.model = model
        self.model_config = ModelView(engine)
        self.vllm_config = VllmConfigView(engine)
        self.device: torch.device = engine.core.config.device
        self.dtype: torch.dtype = engine.core.config.dtype
        self._directory = engine.core.loaded.directory
        self._apply = apply

    def get_model(self) -> WorkerModel:
        """The same as `model`."""
        return self.model

    def reload_weights(
        self,
        weights_iterator: Iterable[tuple[str, Tensor]] | None = None,
        weights_path: str | None = None,
        is_checkpoint_format: bool = True,
    ) -> None:
        """Load weights again: these, those of a directory, or those that the engine was started with."""
        if not is_checkpoint_format:
            raise RequestError("weights must have the names of the checkpoint: use is_checkpoint_format=True")
        new = weights_iterator if weights_iterator is not None else Path(weights_path or self._directory)
        self._apply(new, None)


class Worker:
    """`self` in the methods of a worker's extension."""

    local_rank = 0
    rank = 0

    def __init__(self, engine: TextEngine, link: TrainerLink, apply: Apply) -> None:
        self.model_runner = WorkerRunner(engine, WorkerModel(engine, apply), apply)
        self.model_config = self.model_runner.model_config
        self.vllm_config = self.model_runner.vllm_config
        self.parallel_config = self.vllm_config.parallel_config
        self.cache_config = self.vllm_config.cache_config
        self.scheduler_config = self.vllm_config.scheduler_config
        self.device = self.model_runner.device
        self._link = link

    def get_model(self) -> WorkerModel:
        """The model."""
        return self.model_runner.model

    def reload_weights(self, *args: Any, **kwargs: Any) -> None:
        """As in `model_runner`."""
        self.model_runner.reload_weights(*args, **kwargs)

    def init_weight_transfer_engine(self, init_info: Mapping[str, Any]) -> None:
        """Join the trainer's group."""
        done_here(self._link.init_transfer(init_info))

    def start_weight_update(self) -> None:
        """Begin an update."""
        self._link.start()

    def update_weights(self, update_info: Mapping[str, Any]) -> None:
        """Receive a part of an update."""
        done_here(self._link.receive(update_info))

    def finish_weight_update(self) -> None:
        """Write the update."""
        self._link.finish(None)

    def add_lora(self, lora_request: object) -> bool:
        """Refused."""
        raise RequestError("add_lora is not supported by workers: use LLM.add_lora")

    def remove_lora(self, lora_id: int) -> bool:
        """Refused."""
        raise RequestError("remove_lora is not supported by workers: use LLM.remove_lora")

    def check_health(self) -> None:
        """Nothing to check: it is in the engine's process, so if it answers it is healthy."""


class ModelExecutor:
    """`llm_engine.model_executor`: in vLLM it drives the workers; here there is one."""

    def __init__(self, worker: Worker) -> None:
        self.driver_worker = worker


def extension_class(path: str) -> type:
    """The class of this dotted name. Raises ConfigError if there is none, or if it would hide a worker's own
    names."""
    module, _, name = path.rpartition(".")
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"worker_extension_cls {path!r} cannot be imported: {error}") from error
    if not isinstance(found, type):
        raise ConfigError(f"worker_extension_cls {path!r} is not a class")
    both = [each for each in dir(found) if not each.startswith("__") and each in _own_names()]
    if both:
        raise ConfigError(
            f"worker_extension_cls {path!r} has {', '.join(both)}, which a worker has itself: rename them"
        )
    return found


def _own_names() -> set[str]:
    return {*dir(Worker), "model_runner", "model_config", "vllm_config", "device"}


def make_worker(extension: type | None, engine: TextEngine, link: TrainerLink, apply: Apply) -> Worker:
    """A worker with the methods of an extension, which find a torch.distributed process group, as with vLLM;
    if none exists, it is created for this process alone."""
    if extension is None:
        return Worker(engine, link, apply)
    _ensure_default_group()
    extended: Callable[..., Worker] = type("Worker", (Worker, extension), {})
    return extended(engine, link, apply)


def _ensure_default_group() -> None:
    import torch.distributed as dist

    if dist.is_available() and not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


def get_world_group() -> SimpleNamespace:
    """The group of an engine's workers; its size is one."""
    return SimpleNamespace(rank=0, local_rank=0, world_size=1, rank_in_group=0, ranks=[0])
