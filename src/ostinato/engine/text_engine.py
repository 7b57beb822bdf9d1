"""The engine on text: prompts in, growing `RequestOutput`s out. `LLM` and `AsyncLLM` drive it."""

from __future__ import annotations

import functools
import itertools
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from ostinato.graphs import ConfigError
from ostinato.models.adapters.adapter import Adapter
from ostinato.models.weight_update import NamedTensors

from .adapters.lora_request import LoRARequest
from .adapters.served_adapters import ServedAdapters
from .adapters.slots import AdapterVersion
from .config import EngineConfig
from .core import EngineCore
from .delivery.completion_text import CompletionText
from .delivery.delivery import Delivery
from .delivery.request_counts import RequestCounts
from .delivery.served_completion import ServedCompletion
from .loading.load import place
from .outputs import CompletionOutput, RequestOutput, RequestTimes
from .parameters.parameter_checks import token_sequences
from .parameters.sampling_params import RequestError, SamplingParams
from .prompt_reader import Prompt, PromptReader, cache_salt
from .sampling.logits_processors import LogitsProcessor, ProcessorBatch, processor_classes
from .scheduling.request import Request
from .sleeping.served_weights import WeightsReport
from .sleeping.sleeper import EngineAsleepError, SleepReport, check_mode
from .step_profiler import StepProfiler
from .stepping.flight import Progress
from .stepping.times import StartupTimes
from .surroundings import without_surroundings
from .token_ids import IntArray
from .turns import Turn
from .vllm_api.engine_view import VllmConfigView

logger = logging.getLogger("ostinato.engine")

MAX_COMPLETIONS = 16_384
"""Of one prompt; more would take unbounded memory before the first of them is served."""


class TextEngine:
    """An engine core with a tokenizer in front. Threads take turns."""

    @without_surroundings()
    def __init__(self, config: EngineConfig, *, progress: bool | None = None) -> None:
        """Load, allocate and capture, whatever the caller has set for tensors of its own."""
        startup = StartupTimes()
        processors = processor_classes(config.logits_processors or ())
        with startup.phase("load"):
            placed = place(config)
        if processors and not placed.model.config.has_lm_head:
            raise ConfigError(
                "logits_processors need an output layer, and this model has none: leave them out"
            )
        self.core = EngineCore(placed, progress=progress, startup=startup)
        self.turn = Turn()
        """Held by the thread that does something with the engine."""
        self.is_closed = False
        """Whether it is closed: every call is refused."""
        self._awaited: dict[int, set[str]] = {}
        """By call: see `awaiting`."""
        self.tokenizer = self.core.loaded.tokenizer
        self.prompts = PromptReader(self.tokenizer)
        """Turns prompts into token ids."""
        self._served: dict[str, list[ServedCompletion]] = {}
        """By the name of the prompt."""
        self._taken_names: set[str] = set()
        self._delivery = Delivery(self.tokenizer, self.core.finish)
        self.ended: list[RequestOutput] = []
        """Outputs that ended with the last step."""
        self.counts = RequestCounts()
        """Totals over all requests."""
        self.profiler = StepProfiler()
        self._names = itertools.count()
        # Requests without a seed get one from here, so that a run with the same requests repeats itself.
        self._seeds = np.random.default_rng(config.seed)
        if processors:
            self._use(processors)

    def _use(self, processors: Sequence[type[LogitsProcessor]]) -> None:
        """Let objects of these classes change logits."""
        assert self.core.sampler is not None
        config, device = VllmConfigView(self), self.core.config.device
        try:
            made = [each(config, device, device.type == "cuda") for each in processors]
        except BaseException:
            self.core.close()
            raise
        self.core.sampler.processors = ProcessorBatch(made)

    @property
    def has_work(self) -> bool:
        """Whether a prompt is being served."""
        return bool(self._served) or self.core.has_work

    def new_id(self) -> str:
        """A request id that neither the engine nor a caller has used."""
        return next(name for name in map(str, self._names) if name not in self._served)

    # -- requests in -------------------------------------------------------------------------------

    @property
    def adapters(self) -> ServedAdapters:
        """The adapters that requests may use. Raises RequestError if none are served."""
        if self.core.adapters is None:
            raise RequestError("no adapters are served: start the engine with enable_lora=True")
        return self.core.adapters

    def version_of(self, asked: LoRARequest | None, read: Adapter | None = None) -> AdapterVersion | None:
        """What to pass to `add` for a request with this adapter, which is loaded if it is not; `read`: the
        adapter found at `ServedAdapters.path_to_read`, if that was read already."""
        if asked is None:
            return None
        if not isinstance(asked, LoRARequest):
            raise RequestError(f"lora_request must be a LoRARequest, not {type(asked).__name__}")
        with self.turn:
            return self.adapters.version_of(asked, read)

    def add(
        self,
        prompt: Prompt,
        params: SamplingParams,
        request_id: str | None = None,
        adapter: AdapterVersion | None = None,
    ) -> RequestOutput:
        """Queue a prompt. Raises RequestError if it cannot be served. Each `step` extends the output."""
        params = self._checked(params)
        with self.turn:
            name = self._name(request_id)
            text, given, highest = self.prompts.read(prompt)
            ids, salt = self._cut(given, params), cache_salt(prompt)
            whole = _output(name, text, ids)
            if params.prompt_logprobs is not None:
                whole.prompt_logprobs = [None] * len(ids)
            completions = [
                self._completion(whole, ids, params, index, salt, adapter) for index in range(params.n)
            ]
            if ids is given:
                for completion in completions:
                    completion.request.highest_id = highest
            self._serve(completions)
            return whole

    def add_embedding(
        self, prompt: Prompt, request_id: str | None = None, adapter: AdapterVersion | None = None
    ) -> str:
        """Queue a prompt to embed and return its id."""
        with self.turn:
            name = self._name(request_id)
            text, ids, _ = self.prompts.read(prompt)
            whole, output = _output(name, text, ids), CompletionOutput(0)
            whole.outputs.append(output)
            request = Request(name, ids, None, cache_salt=cache_salt(prompt), adapter=adapter)
            self._serve([ServedCompletion(request, whole, output, output.token_ids)])
            return name

    def abort(self, request_id: str) -> RequestOutput | None:
        """End a prompt now and return its output so far, or None if it is unknown or finished."""
        if self.turn.is_elsewhere:  # in a forked child: the request is the parent's
            return None
        with self.turn:
            completions = self._served.get(_checked_name(request_id))
            if completions is None:
                return None
            for completion in completions:
                if self.core.abort(completion.request.request_id):
                    completion.end()
            self._count(completions)
            self._forget(request_id)
            return completions[0].whole

    def _checked(self, params: SamplingParams) -> SamplingParams:
        """A copy of their present state, with its words as token ids. Raises RequestError for bad values."""
        check_params(params)
        params = params.verified()
        if params.bad_words and self.tokenizer is not None:
            encode = functools.partial(self.tokenizer.encode, add_special_tokens=False)
            params.bad_words = token_sequences(params.bad_words, encode)
        return params

    def _cut(self, ids: IntArray, params: SamplingParams) -> IntArray:
        kept = params.truncate_prompt_tokens
        if kept is None:
            return ids
        if kept < 0:
            kept = max(1, self.core.scheduler.max_len - (params.max_tokens or 1))
        return ids[-kept:]

    def _completion(
        self,
        whole: RequestOutput,
        ids: IntArray,
        params: SamplingParams,
        index: int,
        salt: str | None,
        adapter: AdapterVersion | None,
    ) -> ServedCompletion:
        name = f"{whole.request_id}.{index}" if params.n > 1 else whole.request_id
        own = self._seeded(params, index)
        output = CompletionOutput(index, logprobs=[] if params.wants_logprobs else None)
        text = self._text_of(params, ids, output.token_ids)
        if text is not None:
            output.text = text
        whole.outputs.append(output)
        request = Request(name, ids, own, self._eos, self.core.following.text(params), salt, adapter)
        return ServedCompletion(
            request,
            whole,
            output,
            output.token_ids,
            text,
            has_stops=bool(params.stop),
            has_siblings=params.n > 1,
        )

    def _serve(self, completions: list[ServedCompletion]) -> None:
        for completion in completions:
            if (name := completion.request.request_id) in self._taken_names:
                raise RequestError(f"request {name} is already being served: choose another id")
        name = completions[0].whole.request_id
        self._served[name] = completions
        try:
            # Completions differ in name only, and no refusal depends on it: the first is refused or none.
            for completion in completions:
                self._delivery.add(completion)
                self._taken_names.add(completion.request.request_id)
                self.core.add(completion.request)
                assert completion.whole.metrics is not None
                self.counts.queued(completion.request, completion.whole.metrics)
        except BaseException:
            for completion in completions:
                self.core.abort(completion.request.request_id)
            self._forget(name)
            raise

    def _name(self, request_id: str | None) -> str:
        if self.is_closed:
            raise RequestError("this LLM is closed")
        name = self.new_id() if request_id is None or request_id == "" else _checked_name(request_id)
        if name in self._served:
            raise RequestError(f"request {name} is already being served: choose another id")
        return name

    @property
    def _eos(self) -> frozenset[int]:
        return self.core.loaded.eos_token_ids

    def _seeded(self, params: SamplingParams, index: int) -> SamplingParams:
        """The parameters of one completion, from the prompt's copy: the same object, if there is only one."""
        own = params if params.n == 1 else params.seeded(index)
        if not own.is_greedy and own.seed is None:
            own.seed = int(self._seeds.integers(2**62))
        return own

    def _text_of(
        self, params: SamplingParams, prompt: IntArray, token_ids: list[int]
    ) -> CompletionText | None:
        if self.tokenizer is None or not params.detokenize:
            if params.stop:
                raise RequestError(
                    "stop strings need a tokenizer, and this model has none: use stop_token_ids"
                )
            return None
        detokenizer = self.tokenizer.detokenizer(
            skip_special_tokens=params.skip_special_tokens, behind=prompt
        )
        include_stop = params.include_stop_str_in_output
        return CompletionText(detokenizer, token_ids, params.stop or (), include_stop=include_stop)

    # -- outputs out -------------------------------------------------------------------------------

    def step(self) -> list[RequestOutput]:
        """Run one step and return the outputs that grew or ended, each the object that `add` returned."""
        with self.turn:
            if self.is_closed:
                raise RequestError("this LLM is closed")
            self.turn.is_inside = "one of its own steps"
            began = time.monotonic()
            try:
                steps = self.core.step()
                self.counts.began(began)
                changed, self.ended = self._delivered(steps)
            finally:
                self.turn.is_inside = None
            self._forget_ended()
            self.profiler.stepped()
            self.core.clock.lap("deliver")
            return changed

    def step_until(self, is_over: Callable[[], bool]) -> list[RequestOutput]:
        """Run a step for a caller that waits, unless its wait is over: another thread may have ended it, and
        then put the engine to sleep. Raises EngineAsleepError if the caller would wait forever."""
        with self.turn:
            if is_over() and not self.is_closed:
                return []
            if self.core.scheduler.is_paused and not self.core.can_step:
                raise EngineAsleepError("generation is paused: resume_generation() first")
            return self.step()

    def _forget_ended(self) -> None:
        for output in self.ended:
            self._count(self._served[output.request_id])
            self._forget(output.request_id)

    def sleep(self, level: int, mode: str, tell: Callable[[list[RequestOutput]], None]) -> SleepReport:
        """Release memory; `tell` gets the outputs that change on the way.

        Mode says what happens to unfinished requests: wait serves them to the end first, keep continues them
        after `wake_up`, abort ends them now.
        """
        with self.turn:
            self.core.sleeper.check(level, mode)
            self._quiet_down(mode, tell)
            return self.core.sleep(level)

    def pause(self, mode: str, clear_cache: bool, tell: Callable[[list[RequestOutput]], None]) -> None:
        """Take no further step until `core.resume`; `mode` as in `sleep`."""
        check_mode(mode)
        with self.turn:
            self._quiet_down(mode, tell)
            self.core.pause(clear_cache=clear_cache)

    def _quiet_down(self, mode: str, tell: Callable[[list[RequestOutput]], None]) -> None:
        """Wait for all steps under way, and treat requests as the mode says."""
        if mode == "wait":
            self.core.scheduler.resume()
            while self.core.can_step:
                tell(self.step())
        self.settle(tell)
        if mode == "abort":
            ended = [self.abort(name) for name in list(self._served)]
            tell([output for output in ended if output is not None])

    def settle(self, tell: Callable[[list[RequestOutput]], None]) -> None:
        """Wait for the steps under way; `tell` gets the outputs that they changed."""
        with self.turn:
            changed, self.ended = self._delivered(self.core.settle())
            self._forget_ended()
            tell(changed)

    def wake_up(self, tags: Sequence[str] | None) -> SleepReport:
        """Restore memory, all or that of these tags; waiting requests continue when everything is back."""
        with self.turn:
            return self.core.wake_up(tags)

    def update_weights(
        self,
        new: NamedTensors | str | Path,
        version: str | None,
        tell: Callable[[list[RequestOutput]], None],
    ) -> WeightsReport:
        """Replace weights between two steps; `tell` gets the outputs of steps that end for it."""
        with self.turn:
            self.settle(tell)
            # An iterator may call back into the engine, and would find some weights new and some old.
            self.turn.is_inside = "an update of its weights"
            try:
                return self.core.update_weights(new, version)
            finally:
                self.turn.is_inside = None

    def _delivered(self, steps: list[Progress]) -> tuple[list[RequestOutput], list[RequestOutput]]:
        try:
            return self._delivery.take_in(steps)
        except BaseException as error:
            logger.exception("the results of a step could not be delivered")
            text = f"the results of a step could not be delivered: {type(error).__name__}: {error}"
            ended = self._delivery.fail(steps, text, self.core.abort)
            if not isinstance(error, Exception):
                for output in ended:
                    self._forget(output.request_id)
                raise
            return ended, ended

    def _forget(self, name: str) -> None:
        for completion in self._served.pop(name):
            self._delivery.remove(completion)
            self._taken_names.discard(completion.request.request_id)
        for names in tuple(self._awaited.values()):  # other threads begin and end calls at the same time
            names.discard(name)

    @contextmanager
    def awaiting(self) -> Iterator[set[str]]:
        """A set for the names that a call waits for; a name is removed when it ends, whichever thread's step
        ends it. Names that are left at the end are aborted."""
        names: set[str] = set()
        self._awaited[id(names)] = names
        try:
            yield names
        finally:
            for name in list(names):
                self.abort(name)
            del self._awaited[id(names)]

    def _count(self, completions: list[ServedCompletion]) -> None:
        self.counts.ended(completions[0].whole, completions[0].request.num_prompt_tokens)

    def served_embedding(self, name: str) -> ServedCompletion:
        """The request that `add_embedding` queued; once it has ended, `outcome_of` gives its result."""
        [served] = self._served[name]
        return served

    def close(self) -> None:
        """Abort everything and drop all graphs."""
        with self.turn:
            self.is_closed = True
            for name in list(self._served):
                self.abort(name)
            self.profiler.close()
            self.core.close()


def check_params(params: object, which: str = "") -> None:
    """Raises RequestError unless these are SamplingParams."""
    if not isinstance(params, SamplingParams):
        raise RequestError(f"sampling_params{which} must be SamplingParams, not {type(params).__name__}")
    if params.n > MAX_COMPLETIONS:
        raise RequestError(f"n must be at most {MAX_COMPLETIONS:,}, not {params.n:,}")


def _checked_name(request_id: object) -> str:
    if not isinstance(request_id, str):
        raise RequestError(f"a request id must be a string, not {type(request_id).__name__}")
    return request_id


def _output(name: str, text: str | None, ids: IntArray) -> RequestOutput:
    output = RequestOutput(name, text, [], [], metrics=RequestTimes())
    # Few callers read it, and making a list of a long prompt takes longer than scheduling the whole request.
    output.read_later(prompt_token_ids=ids.tolist)
    return output
