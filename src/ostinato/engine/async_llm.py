"""`AsyncLLM`: the same engine for asyncio. One thread runs its steps; coroutines add, await and abort."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast, overload

from ostinato.graphs import Report
from ostinato.models.adapters.adapter import Adapter
from ostinato.models.weight_update import NamedTensors
from ostinato.text.hf_like_tokenizer import HFLikeTokenizer

from .adapters.lora_request import LoRARequest
from .coroutines.engine_thread import EngineThread, Inbox, Inboxes
from .delivery.served_completion import ServedCompletion
from .llm import LLM
from .outputs import RequestOutput
from .parameters.sampling_params import RequestError, SamplingParams
from .pooling_outputs import PoolingOutput, PoolingRequestOutput
from .prompt_reader import Prompt
from .sleeping.served_weights import WeightsReport
from .sleeping.sleeper import SleepReport, check_mode
from .speculating.counts import SpeculationReport
from .text_engine import TextEngine, check_params
from .vllm_api.async_trainer_services import AsyncTrainerServices
from .vllm_api.conversations import Messages
from .vllm_api.engine_view import ModelView
from .vllm_api.llm_engine import refuse_given
from .vllm_api.metrics import Metric
from .vllm_api.pooling_params import PoolingParams
from .vllm_api.trainer_services import PartOfUpdate, inside, is_part_of_update

if TYPE_CHECKING:
    from .vllm_api.engine_args import AsyncEngineArgs

_Found = TypeVar("_Found")


def listed_names(given: object) -> list[str]:
    """A list of request ids. Raises RequestError if one is not a string."""
    names = []
    for name in given if isinstance(given, list | tuple | set | frozenset) else [given]:
        if not isinstance(name, str):
            raise RequestError(f"a request id must be a string, not {type(name).__name__}")
        names.append(name)
    return names


class AsyncLLM(AsyncTrainerServices):
    """A model that serves many coroutines at once, from one or more event loops."""

    def __init__(self, model: str | Path | None = None, **options: Any) -> None:
        """Takes the arguments of `LLM`."""
        self._llm = LLM(model, **options)
        self._turn = self._llm.engine.turn
        self._inboxes = Inboxes()
        self._llm.tell_outputs = lambda new: self._inboxes.tell(self._llm.engine, new)
        self._thread = EngineThread(self._llm, self._inboxes)

    @classmethod
    def from_engine_args(
        cls, engine_args: AsyncEngineArgs, usage_context: object = None, stat_loggers: None = None
    ) -> AsyncLLM:
        """Create an `AsyncLLM` from options in one object. Usage is not tracked, so its context is unused."""
        refuse_given(stat_loggers=stat_loggers)
        return cls(**engine_args.keywords())

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        lora_request: LoRARequest | None = None,
        tokenization_kwargs: None = None,
        priority: int = 0,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Yield the request's output as it grows, and finally the finished one; `sampling_params.output_kind`
        selects whether each contains everything so far or only what is new, or only the final one is yielded.

        Leaving the loop early, or cancelling the task, aborts the request. Raises RequestError if the request
        is refused or fails.
        """
        refuse_given(tokenization_kwargs=tokenization_kwargs, priority=priority)
        loop = asyncio.get_running_loop()
        arrived: Inbox = asyncio.Queue()
        asked = self._llm.get_default_sampling_params() if sampling_params is None else sampling_params
        check_params(asked)
        params = asked.clone()
        name: asyncio.Future[str] = loop.create_future()
        read: Adapter | None = None

        def add(engine: TextEngine) -> str:
            with engine.turn, self._inboxes.arrival(engine, arrived):
                adapter = engine.version_of(lora_request, read)
                output = engine.add(prompt, params, request_id, adapter)
                output.lora_request = lora_request
                return output.request_id

        try:
            if lora_request is not None:
                read = await self._read(lora_request, arrived)
            self._thread.do(lambda engine: self._inboxes.add(engine, add, params, loop, arrived, name))
            await name
            while True:
                news = await arrived.get()
                if isinstance(news, BaseException):
                    raise news
                if news.error is not None:
                    raise RequestError(news.error)
                yield news
                if news.finished:
                    return
        finally:
            with contextlib.suppress(RequestError):  # closed in the meantime: nothing is left to abort
                self._thread.do(lambda engine: self._inboxes.give_up(engine, arrived))

    async def chat(
        self,
        messages: Messages,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        lora_request: LoRARequest | None = None,
        **options: Any,
    ) -> AsyncIterator[RequestOutput]:
        """Like `generate`, for the answer to one conversation; `options` are those of `LLM.chat`."""
        prompt = self._llm.chat_prompt(messages, **options)
        work = self.generate(prompt, sampling_params, request_id, lora_request=lora_request)
        async with contextlib.aclosing(work) as outputs:
            async for output in outputs:
                yield output

    async def encode(
        self,
        prompt: Prompt,
        pooling_params: PoolingParams,
        request_id: str | None = None,
        lora_request: LoRARequest | None = None,
    ) -> AsyncIterator[PoolingRequestOutput[PoolingOutput]]:
        """Yield the result of `LLM.encode` once; `pooling_params.task` selects the task (default: embed)."""
        if not isinstance(pooling_params, PoolingParams):
            raise RequestError(f"pooling_params must be PoolingParams, not {pooling_params!r}")
        wanted = pooling_params if pooling_params.task else replace(pooling_params, task="embed")
        reader = self._llm.reader()
        reader.check(wanted)
        loop = asyncio.get_running_loop()
        arrived: Inbox = asyncio.Queue()
        read: Adapter | None = None

        def add(engine: TextEngine) -> ServedCompletion:
            with self._inboxes.arrival(engine, arrived):
                name = engine.add_embedding(prompt, request_id, engine.version_of(lora_request, read))
            self._inboxes.listen(name, loop, arrived)
            return engine.served_embedding(name)

        try:
            if lora_request is not None:
                read = await self._read(lora_request, arrived)
            served = await self._thread.call(add)
            news = await arrived.get()
            if isinstance(news, BaseException):
                raise news
        finally:
            with contextlib.suppress(RequestError):
                self._thread.do(lambda engine: self._inboxes.give_up(engine, arrived))
        output = reader.pooled(served, wanted)
        if output.error is not None:
            raise RequestError(output.error)
        yield output

    async def abort(self, request_id: str | Iterable[str], internal: bool = False) -> None:
        """End requests now; their coroutines get the output so far. `internal` exists for compatibility with
        vLLM and has no effect: Ostinato has only one kind of request ids."""
        names = [request_id] if isinstance(request_id, str) else listed_names(request_id)

        def abort(engine: TextEngine) -> None:
            ended = [engine.abort(name) for name in names]
            self._inboxes.tell(engine, [output for output in ended if output is not None])

        self._thread.do(abort)

    def pause(self) -> None:
        """Stop taking steps until `resume`. Requests keep their place, and new ones are accepted."""
        self._thread.do(lambda engine: engine.core.scheduler.pause())

    def resume(self) -> None:
        """Continue after `pause`."""
        self._thread.do(lambda engine: engine.core.resume())

    async def sleep(self, level: int = 1, mode: str = "abort") -> SleepReport:
        """As `LLM.sleep`; kept requests, and those that arrive while asleep, wait for `wake_up`."""
        await self._thread.call(lambda engine: engine.core.sleeper.check(level, mode))
        mode = await self._drained(mode)

        def sleep(engine: TextEngine) -> SleepReport:
            return engine.sleep(level, mode, lambda new: self._inboxes.tell(engine, new))

        return await self._between_tokens(sleep, takes_pages=level > 0 and mode == "keep")

    async def wake_up(self, tags: Sequence[str] | None = None) -> SleepReport:
        """As `LLM.wake_up`."""
        return await self._thread.call(lambda engine: engine.wake_up(tags))

    @overload
    async def update_weights(
        self, weights: NamedTensors | str | Path, *, version: str | None = None
    ) -> WeightsReport: ...

    @overload
    async def update_weights(self, weights: PartOfUpdate, *, version: None = None) -> None: ...

    async def update_weights(self, weights: Any, *, version: str | None = None) -> WeightsReport | None:
        """As `LLM.update_weights`; running requests continue."""
        if is_part_of_update(weights):
            await self._operated(self._llm.trainer_link.receive(inside(weights, "update_info")))
            return None
        return await self._thread.call(lambda _: self._llm.update_weights(weights, version=version))

    async def _read(self, asked: LoRARequest, arrived: Inbox | None = None) -> Adapter | None:
        """Read this adapter's files, if needed, while the engine runs steps; None if nothing has to be read.
        `arrived`: the inbox of the request that needs the adapter, if there is one."""
        if not isinstance(asked, LoRARequest):
            raise RequestError(f"lora_request must be a LoRARequest, not {type(asked).__name__}")

        def path_to_read(engine: TextEngine) -> str | None:
            path = engine.adapters.path_to_read(asked)
            if path is not None and arrived is not None:
                self._inboxes.announce(engine, arrived)
            return path

        path = await self._thread.call(path_to_read)
        if path is None:
            return None
        return await asyncio.to_thread(self._llm.engine.adapters.read, path)

    async def add_lora(self, lora_request: LoRARequest) -> bool:
        """As `LLM.add_lora`; requests continue while the adapter is read."""
        read = await self._read(lora_request)
        return await self._thread.call(lambda engine: engine.adapters.load(lora_request, read))

    async def remove_lora(self, lora_id: int) -> bool:
        """As `LLM.remove_lora`."""
        return await self._thread.call(lambda _: self._llm.remove_lora(lora_id))

    async def pin_lora(self, lora_id: int) -> bool:
        """As `LLM.pin_lora`."""
        return await self._thread.call(lambda _: self._llm.pin_lora(lora_id))

    async def list_loras(self) -> set[int]:
        """As `LLM.list_loras`."""
        return await self._thread.call(lambda _: self._llm.list_loras())

    async def is_sleeping(self) -> bool:
        """As `LLM.is_sleeping`."""
        return await self._thread.call(lambda engine: engine.core.sleeper.is_sleeping)

    async def pause_generation(
        self,
        *,
        mode: str = "abort",
        wait_for_inflight_requests: bool | None = None,
        clear_cache: bool = True,
    ) -> None:
        """As `LLM.pause_generation`; requests that arrive while paused wait for `resume_generation`."""
        chosen = "wait" if wait_for_inflight_requests else mode
        check_mode(chosen)
        chosen = await self._drained(chosen)

        def pause(engine: TextEngine) -> None:
            engine.pause(chosen, clear_cache, lambda new: self._inboxes.tell(engine, new))

        await self._between_tokens(pause, takes_pages=clear_cache and chosen == "keep")

    async def resume_generation(self) -> None:
        """As `LLM.resume_generation`."""
        await self._thread.call(lambda engine: engine.core.resume())

    async def is_paused(self) -> bool:
        """As `LLM.is_paused`."""
        return await self._thread.call(lambda engine: engine.core.is_paused)

    async def wait_for_requests_to_drain(self, drain_timeout: float = 300) -> None:
        """Wait until all requests are finished, new ones included; raises TimeoutError after that time."""
        async with asyncio.timeout(drain_timeout):
            while await self._thread.call(lambda engine: engine.has_work):
                await asyncio.sleep(0.001)

    async def _between_tokens(self, function: Callable[[TextEngine], _Found], *, takes_pages: bool) -> _Found:
        """Run `function` on the engine's thread. If it `takes_pages` from all requests, it waits until some
        request has advanced since the last such call."""
        is_due = False

        def if_due(engine: TextEngine) -> _Found | None:
            nonlocal is_due
            is_due = not (takes_pages and engine.core.owes_progress)
            return function(engine) if is_due else None

        while True:
            found = await self._thread.call(if_due)
            if is_due:
                return cast(_Found, found)
            await asyncio.sleep(0.001)

    async def _drained(self, mode: str) -> str:
        """In mode wait, wait for running requests; new ones are held, and any may be aborted. Returns the
        mode that remains to be applied. If cancelled, leaves everything as it was."""
        if mode != "wait":
            return mode
        undo: list[Callable[[], None]] = []

        def begin(engine: TextEngine) -> None:
            scheduler = engine.core.scheduler
            if not scheduler.is_draining:
                undo.append(scheduler.pause if scheduler.is_paused else scheduler.resume)
            scheduler.drain()

        def leave(engine: TextEngine) -> None:
            if undo and engine.core.scheduler.is_draining:
                undo[0]()

        try:
            await self._thread.call(begin)
            while await self._thread.call(lambda engine: engine.core.still_drains):
                await asyncio.sleep(0.001)
        except asyncio.CancelledError:
            with contextlib.suppress(RequestError):  # it is closed
                self._thread.do(leave)
            raise
        return "keep"

    def get_tokenizer(self) -> HFLikeTokenizer:
        """As `LLM.get_tokenizer`."""
        return self._llm.get_tokenizer()

    @property
    def model_config(self) -> ModelView:
        """As `LLM.model_config`."""
        return self._llm.model_config

    async def get_model_config(self) -> ModelView:
        """The same."""
        return self._llm.model_config

    async def reset_prefix_cache(
        self, reset_running_requests: bool = False, reset_connector: bool = False
    ) -> bool:
        """As `LLM.reset_prefix_cache`."""
        return await self._between_tokens(
            lambda _: self._llm.reset_prefix_cache(reset_running_requests, reset_connector),
            takes_pages=reset_running_requests,
        )

    async def reset_mm_cache(self) -> None:
        """As `LLM.reset_mm_cache`."""

    async def reset_encoder_cache(self) -> None:
        """The same."""

    async def get_metrics(self) -> list[Metric]:
        """As `LLM.get_metrics`."""
        return await self._thread.call(lambda _: self._llm.get_metrics())

    async def start_profile(self, profile_prefix: str | None = None) -> None:
        """As `LLM.start_profile`."""
        await self._thread.call(lambda _: self._llm.start_profile(profile_prefix))

    async def stop_profile(self) -> str:
        """As `LLM.stop_profile`."""
        return await self._thread.call(lambda _: self._llm.stop_profile())

    async def check_health(self) -> None:
        """Raise RequestError if the engine has stopped."""
        if not self.is_running:
            raise RequestError("this AsyncLLM is closed")

    @property
    def is_running(self) -> bool:
        """Whether requests are served."""
        return self._thread.is_running

    @property
    def errored(self) -> bool:
        """Whether the engine no longer serves requests."""
        return not self.is_running

    def shutdown(self) -> None:
        """Same as `close`."""
        self.close()

    def graph_report(self) -> Report:
        """As `LLM.graph_report`."""
        return self._llm.graph_report()

    def speculation_report(self) -> SpeculationReport | None:
        """As `LLM.speculation_report`."""
        return self._llm.speculation_report()

    def close(self) -> None:
        """Stop serving and free everything; running requests end with RequestError. Does nothing in a forked
        child, because everything is the parent's."""
        if self._turn.is_elsewhere:
            return
        self._thread.stop()
        self._llm.close()

    async def __aenter__(self) -> AsyncLLM:
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.to_thread(self.close)


AsyncLLMEngine = AsyncLLM
"""The older name of `AsyncLLM`."""
