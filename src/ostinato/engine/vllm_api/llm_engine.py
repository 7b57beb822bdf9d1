"""`LLMEngine`: requests in, one step at a time, for callers that drive the engine themselves."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ..adapters.lora_request import LoRARequest
from ..delivery.output_stream import OutputStream
from ..delivery.served_completion import ServedCompletion
from ..interrupts import HeldSignals
from ..outputs import RequestOutput
from ..parameters.sampling_params import RequestError, SamplingParams
from ..pooling_outputs import PoolingOutput, PoolingRequestOutput
from .engine_services import EngineServices, OwnEngine
from .engine_view import ModelView, VllmConfigView
from .pooling_params import PoolingParams
from .trainer_services import TrainerServices
from .worker import ModelExecutor

if TYPE_CHECKING:
    from .engine_args import EngineArgs

AnyOutput = RequestOutput | PoolingRequestOutput[PoolingOutput]


@dataclass
class _Watched:
    """A request, and how much of it was returned."""

    output: RequestOutput
    stream: OutputStream
    num_told: int = -1
    """Number of returned tokens of all completions."""

    def news(self) -> RequestOutput | None:
        count = sum(len(completion.token_ids) for completion in self.output.outputs)
        if count == self.num_told and not self.output.finished:
            return None
        self.num_told = count
        return self.stream.news(self.output)


class LLMEngine:
    """The engine of an `LLM`, step by step. `LLM.generate` may be called in between; each gets its own
    outputs."""

    def __init__(self, services: EngineServices) -> None:
        """Takes an `LLM`, for example; `from_engine_args` makes its own engine."""
        self._services = services
        self._watched: dict[str, _Watched] = {}
        self._read: dict[str, tuple[ServedCompletion, PoolingParams]] = {}
        """Prompts that are only read, not completed."""

    @classmethod
    def from_engine_args(
        cls,
        engine_args: EngineArgs,
        usage_context: object = None,
        stat_loggers: None = None,
        enable_multiprocessing: bool = False,
    ) -> LLMEngine:
        """Load a model with these options, in this process. Usage is not tracked, so its context is
        unused."""
        refuse_given(stat_loggers=stat_loggers, enable_multiprocessing=enable_multiprocessing)
        return cls(OwnEngine(**engine_args.keywords()))

    def add_request(
        self,
        request_id: str,
        prompt: Any,
        params: SamplingParams | PoolingParams,
        arrival_time: float | None = None,
        lora_request: LoRARequest | None = None,
        tokenization_kwargs: None = None,
        trace_headers: None = None,
        priority: int = 0,
    ) -> str:
        """Queue a request. Raises RequestError if it cannot be served. Requests are served in the order of
        these calls; `arrival_time` is used for `metrics` only."""
        refuse_given(
            tokenization_kwargs=tokenization_kwargs,
            trace_headers=trace_headers,
            priority=priority,
        )
        if not isinstance(request_id, str):
            raise TypeError(f"request_id must be a string, not {request_id!r}")
        engine = self._services.engine
        if isinstance(params, PoolingParams):
            wanted = params if params.task else replace(params, task="embed")
            self._services.reader().check(wanted)
            with HeldSignals(), engine.turn:
                name = engine.add_embedding(prompt, request_id, engine.version_of(lora_request))
                self._read[name] = engine.served_embedding(name), wanted
            return name
        if not isinstance(params, SamplingParams):
            raise TypeError(f"params must be SamplingParams or PoolingParams, not {params!r}")
        with HeldSignals(), engine.turn:
            output = engine.add(prompt, params, request_id, engine.version_of(lora_request))
            output.lora_request = lora_request
            self._watched[output.request_id] = _Watched(output, OutputStream(params))
        if arrival_time is not None and output.metrics is not None:
            output.metrics.arrival_time = arrival_time
        return output.request_id

    def step(self) -> list[AnyOutput]:
        """Run one step; return what is new of the requests added here, finished ones for the last time."""
        engine = self._services.engine
        if engine.has_work:
            with HeldSignals():
                engine.step()
        told: list[AnyOutput] = []
        for name, watched in list(self._watched.items()):
            if (news := watched.news()) is not None:
                told.append(news)
            if watched.output.finished:
                del self._watched[name]
        for name, (served, wanted) in list(self._read.items()):
            if served.whole.finished:
                del self._read[name]
                told.append(self._services.reader().pooled(served, wanted))
        return told

    def abort_request(self, request_ids: str | Iterable[str]) -> None:
        """End requests now; nothing more of them is returned. Unknown ones are ignored."""
        for name in [request_ids] if isinstance(request_ids, str) else list(request_ids):
            if name in self._watched or name in self._read:
                with HeldSignals():
                    self._services.engine.abort(name)
                    self._watched.pop(name, None)
                    self._read.pop(name, None)

    def has_unfinished_requests(self) -> bool:
        """Whether a step would return something, now or later."""
        return bool(self._watched or self._read)

    def get_num_unfinished_requests(self) -> int:
        """Number of unfinished requests."""
        return len(self._watched) + len(self._read)

    # -- the same as in LLM ------------------------------------------------------------------------

    @property
    def model_config(self) -> ModelView:
        """Facts about the model."""
        return ModelView(self._services.engine)

    @property
    def vllm_config(self) -> VllmConfigView:
        """What the engine runs with."""
        return VllmConfigView(self._services.engine)

    @property
    def model_executor(self) -> ModelExecutor:
        """Holds the worker: trainers in this process write weights through it, as with vLLM."""
        if not isinstance(self._services, TrainerServices):
            raise AttributeError(
                "model_executor exists only for the engine of an LLM: use LLM(...).llm_engine"
            )
        return ModelExecutor(self._services.worker)

    @property
    def tokenizer(self) -> Any:
        """As `get_tokenizer`; None if the model has none."""
        return None if self._services.tokenizer is None else self._services.get_tokenizer()

    def get_tokenizer(self) -> Any:
        """As `LLM.get_tokenizer`."""
        return self._services.get_tokenizer()

    def get_metrics(self) -> list[Any]:
        """As `LLM.get_metrics`."""
        return list(self._services.get_metrics())

    def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        """As `LLM.reset_prefix_cache`."""
        return self._services.reset_prefix_cache(reset_running_requests)

    def is_sleeping(self) -> bool:
        """As `LLM.is_sleeping`."""
        return self._services.engine.core.sleeper.is_sleeping

    def add_lora(self, lora_request: LoRARequest) -> bool:
        """As `LLM.add_lora`."""
        return self._services.add_lora(lora_request)

    def remove_lora(self, lora_id: int) -> bool:
        """As `LLM.remove_lora`."""
        return self._services.remove_lora(lora_id)

    def pin_lora(self, lora_id: int) -> bool:
        """As `LLM.pin_lora`."""
        return self._services.pin_lora(lora_id)

    def list_loras(self) -> set[int]:
        """As `LLM.list_loras`."""
        return self._services.list_loras()

    def start_profile(self, profile_prefix: str | None = None) -> None:
        """As `LLM.start_profile`."""
        self._services.start_profile(profile_prefix)

    def stop_profile(self) -> None:
        """As `LLM.stop_profile`."""
        self._services.stop_profile()

    def close(self) -> None:
        """Free what `from_engine_args` created."""
        if isinstance(self._services, OwnEngine):
            self._services.close()


def refuse_given(**given: Any) -> None:
    """Raises RequestError for vLLM's keywords that request something that does not exist here."""
    reasons = {
        "tokenization_kwargs": "tokenize the prompt yourself: {'prompt_token_ids': [...]}",
        "mm_processor_kwargs": "models here take text only",
        "priority": "requests are served in the order of their arrival",
        "trace_headers": "nothing is traced",
        "stat_loggers": "ask get_metrics()",
        "enable_multiprocessing": "the engine runs in this process",
    }
    for name, value in given.items():
        is_zeros = name == "priority" and (value == 0 or (isinstance(value, list) and not any(value)))
        if value not in (None, False, {}) and not is_zeros:
            raise RequestError(f"{name} is not supported: {reasons[name]}")
