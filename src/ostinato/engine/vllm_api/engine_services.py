"""What can be asked of an engine beside completions: its tokenizer, its metrics, a profile, a clean cache."""

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
    """Of an engine that somebody else may drive as well."""

    _options: LLMOptions

    @property
    def engine(self) -> TextEngine:
        """The engine inside."""
        raise NotImplementedError

    @property
    def tokenizer(self) -> Any:
        """The model's tokenizer; None where it has none."""
        return self.engine.tokenizer

    def get_tokenizer(self) -> HFLikeTokenizer:
        """The tokenizer with the calls of transformers' tokenizers."""
        if self.tokenizer is None:
            raise RequestError("this model has no tokenizer")
        loaded = self.engine.core.loaded
        return HFLikeTokenizer(self.tokenizer, str(loaded.tokenizer_directory), loaded.config.max_model_len)

    def get_default_sampling_params(self) -> SamplingParams:
        """What requests without parameters are sampled with: see `EngineConfig.generation_config`."""
        return SamplingParams(**self.engine.core.loaded.default_sampling)

    @property
    def model_config(self) -> ModelView:
        """What the model is, under vLLM's names."""
        return ModelView(self.engine)

    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        """Forget all cached prefixes. Requests under way keep what they have, unless
        `reset_running_requests`: then they are computed again. `reset_connector` is about KV caches
        elsewhere: there are none to be forgotten. Always True."""
        with self.engine.turn:
            self.engine.core.scheduler.flush_prefix_cache(computes_again=reset_running_requests)
        return True

    def reset_mm_cache(self) -> None:
        """Of images and sounds: nothing is cached."""

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

        `mode`: requests under way end now (abort), are served to the end before (wait, or
        `wait_for_inflight_requests`), or go on after (keep). `clear_cache` forgets cached prefixes, and
        requests that go on are computed again; else they keep their KV.
        """
        chosen = "wait" if wait_for_inflight_requests else mode
        self.engine.pause(chosen, clear_cache, lambda outputs: None)

    def resume_generation(self) -> None:
        """Go on after `pause_generation`."""
        with self.engine.turn:
            self.engine.core.resume()

    def is_paused(self) -> bool:
        """Whether a pause is in force, or the engine sleeps."""
        return self.engine.core.is_paused

    def get_metrics(self) -> list[Metric]:
        """What the engine counted so far, under vLLM's names."""
        return metrics_of(self.engine, self._options.served_model_name)

    def start_profile(self, profile_prefix: str | None = None) -> None:
        """Begin a profile of torch; `stop_profile` leaves its trace in a folder (see `LLMOptions`)."""
        options = self._options
        file = options.trace_file(profile_prefix)
        with self.engine.turn:
            self.engine.profiler.start(file, delay=options.profile_delay, most=options.profile_steps)

    def stop_profile(self) -> str:
        """End the profile; the file that has it."""
        with self.engine.turn:
            return self.engine.profiler.stop()

    def reader(
        self, shown: Shown = False, pooling: str | None = None, lora_request: AskedAdapters = None
    ) -> Reader:
        """What reads prompts for `embed` and its like; `shown`: a bar over them."""
        chosen = pooling or self._options.pooling or self.engine.core.loaded.pooling
        return Reader(self.engine, chosen, shown, lora_request)

    def add_lora(self, lora_request: LoRARequest) -> bool:
        """Load an adapter now, in place of the one before with `load_inplace`. False if it was there."""
        with self.engine.turn:
            return self.engine.adapters.load(lora_request)

    def remove_lora(self, lora_id: int) -> bool:
        """Forget an adapter; False if there is none of this number, RequestError while requests use it."""
        with self.engine.turn:
            name = self.engine.adapters.name_of(lora_id)
            if name is not None:
                self.engine.adapters.remove(name)
            return name is not None

    def pin_lora(self, lora_id: int) -> bool:
        """Let an adapter keep its slot on the device when nobody uses it; False if there is none."""
        with self.engine.turn:
            name = self.engine.adapters.name_of(lora_id)
            if name is not None:
                self.engine.adapters.pin(name)
            return name is not None

    def list_loras(self) -> set[int]:
        """The numbers of all adapters that are loaded."""
        with self.engine.turn:
            return {each.lora_int_id for each in self.engine.adapters.listed()}


class OwnEngine(EngineServices):
    """An engine that nobody else drives."""

    def __init__(self, model: str | None = None, **options: Any) -> None:
        """As `LLM`."""
        config, self._options = llm_options(model, options)
        if config.worker_extension_cls is not None:
            raise ConfigError("worker_extension_cls is for LLM and AsyncLLM: nobody could call it here")
        self._engine = TextEngine(config)

    @property
    def engine(self) -> TextEngine:
        """The engine inside."""
        return self._engine

    def close(self) -> None:
        """Abort everything and drop all graphs."""
        self._engine.close()
        if (memory := self._engine.core.loaded.memory) is not None:
            memory.saver.close()
