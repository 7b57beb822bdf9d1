"""What an engine offers besides completions: its tokenizer, metrics, a profile, a cache reset."""

from __future__ import annotations

from typing import Any

from ostinato.graphs import ConfigError
from ostinato.text.hf_like_tokenizer import HFLikeTokenizer

from ..adapters.lora_request import AskedAdapters, LoRARequest
from ..delivery.request_progress import Shown
from ..parameters.sampling_params import RequestError, SamplingParams
from ..text_engine import TextEngine
from .engine_view import ModelView
from .llm_options import LLMOptions, llm_options
from .metrics import Metric, metrics_of
from .pooling import Reader


class EngineServices:
    """For an engine that others may drive as well."""

    _options: LLMOptions

    @property
    def engine(self) -> TextEngine:
        """The underlying engine."""
        raise NotImplementedError

    @property
    def tokenizer(self) -> Any:
        """The model's tokenizer; None if it has none."""
        return self.engine.tokenizer

    def get_tokenizer(self) -> HFLikeTokenizer:
        """The tokenizer with the calls of transformers' tokenizers."""
        if self.tokenizer is None:
            raise RequestError("this model has no tokenizer: work with token ids")
        loaded = self.engine.core.loaded
        return HFLikeTokenizer(self.tokenizer, str(loaded.tokenizer_directory), loaded.config.max_model_len)

    def get_default_sampling_params(self) -> SamplingParams:
        """The defaults of requests without parameters: see `EngineConfig.generation_config`."""
        return SamplingParams(**self.engine.core.loaded.default_sampling)

    @property
    def model_config(self) -> ModelView:
        """Facts about the model, under vLLM's names."""
        return ModelView(self.engine)

    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        """Forget all cached prefixes. Unfinished requests keep their KV, unless `reset_running_requests`:
        then they are computed again. `reset_connector` is about external KV caches, of which there are none.
        Always returns True."""
        with self.engine.turn:
            self.engine.core.scheduler.flush_prefix_cache(computes_again=reset_running_requests)
        return True

    def reset_mm_cache(self) -> None:
        """For images and sounds: nothing is cached."""

    def reset_encoder_cache(self) -> None:
        """The same."""

    def pause_generation(
        self,
        *,
        mode: str = "abort",
        wait_for_inflight_requests: bool | None = None,
        clear_cache: bool = True,
    ) -> None:
        """Take no further step until `resume_generation`.

        `mode`: unfinished requests end now (abort), are served to the end first (wait, or
        `wait_for_inflight_requests`), or continue afterwards (keep). `clear_cache` forgets cached prefixes,
        and requests that continue are then computed again; otherwise they keep their KV.
        """
        chosen = "wait" if wait_for_inflight_requests else mode
        self.engine.pause(chosen, clear_cache, lambda outputs: None)

    def resume_generation(self) -> None:
        """Go on after `pause_generation`."""
        with self.engine.turn:
            self.engine.core.resume()

    def is_paused(self) -> bool:
        """Whether the engine is paused or sleeps."""
        return self.engine.core.is_paused

    def get_metrics(self) -> list[Metric]:
        """What the engine has counted so far, under vLLM's names."""
        return metrics_of(self.engine, self._options.served_model_name)

    def start_profile(self, profile_prefix: str | None = None) -> None:
        """Begin a torch profile; `stop_profile` writes its trace to a folder (see `LLMOptions`)."""
        options = self._options
        file = options.trace_file(profile_prefix)
        with self.engine.turn:
            self.engine.profiler.start(file, delay=options.profile_delay, most=options.profile_steps)

    def stop_profile(self) -> str:
        """End the profile and return its file."""
        with self.engine.turn:
            return self.engine.profiler.stop()

    def reader(
        self, shown: Shown = False, pooling: str | None = None, lora_request: AskedAdapters = None
    ) -> Reader:
        """Reads prompts for `embed` and similar calls; `shown`: show a progress bar."""
        chosen = pooling or self._options.pooling or self.engine.core.loaded.pooling
        return Reader(self.engine, chosen, shown, lora_request)

    def add_lora(self, lora_request: LoRARequest) -> bool:
        """Load an adapter now, with `load_inplace` in place of its predecessor. False if it was already
        loaded."""
        with self.engine.turn:
            return self.engine.adapters.load(lora_request)

    def remove_lora(self, lora_id: int) -> bool:
        """Forget an adapter. False if no adapter has this number; raises RequestError while requests use
        it."""
        with self.engine.turn:
            name = self.engine.adapters.name_of(lora_id)
            if name is not None:
                self.engine.adapters.remove(name)
            return name is not None

    def pin_lora(self, lora_id: int) -> bool:
        """Let an adapter keep its slot on the device while unused. False if no adapter has this number."""
        with self.engine.turn:
            name = self.engine.adapters.name_of(lora_id)
            if name is not None:
                self.engine.adapters.pin(name)
            return name is not None

    def list_loras(self) -> set[int]:
        """The numbers of all loaded adapters."""
        with self.engine.turn:
            return {each.lora_int_id for each in self.engine.adapters.listed()}


class OwnEngine(EngineServices):
    """An engine of its own, driven by nothing else."""

    def __init__(self, model: str | None = None, **options: Any) -> None:
        """Takes the arguments of `LLM`."""
        config, self._options = llm_options(model, options)
        if config.worker_extension_cls is not None:
            raise ConfigError("worker_extension_cls works only with LLM and AsyncLLM: leave it out")
        self._engine = TextEngine(config)

    @property
    def engine(self) -> TextEngine:
        """The underlying engine."""
        return self._engine

    def close(self) -> None:
        """Abort everything and drop all graphs."""
        self._engine.close()
        if (memory := self._engine.core.loaded.memory) is not None:
            memory.saver.close()
