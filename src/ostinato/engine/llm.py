"""`LLM`: load a model, generate, chat, embed; offline and in this process."""

from __future__ import annotations

import functools
import gc
import logging
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, overload

import torch

from ostinato.graphs import Report
from ostinato.models.shared_weights import shared_weights
from ostinato.models.weight_update import NamedTensors

from .adapters.lora_request import AskedAdapters, LoRARequest, one_adapter_each
from .delivery.request_progress import Shown
from .interrupts import HeldSignals
from .outputs import RequestOutput
from .parameters.sampling_params import BeamSearchParams, RequestError, SamplingParams
from .pooling_outputs import (
    ClassificationRequestOutput,
    EmbeddingRequestOutput,
    PoolingOutput,
    PoolingRequestOutput,
    ScoringRequestOutput,
)
from .prompt_reader import Prompt
from .served_prompts import begin, finish, one_each, served
from .sleeping.served_weights import WeightsReport
from .sleeping.sleeper import SleepReport
from .speculating.counts import SpeculationReport
from .stepping.times import StepTimes
from .text_engine import TextEngine
from .vllm_api.beam_search import BeamSearch, BeamSearchOutput
from .vllm_api.conversations import ChatOptions, ConversationWriter, Messages, listed_conversations
from .vllm_api.engine_services import EngineServices
from .vllm_api.llm_engine import LLMEngine, refuse_given
from .vllm_api.llm_options import llm_options
from .vllm_api.pooling_params import PoolingParams
from .vllm_api.prompts import listed_prompts
from .vllm_api.trainer_services import PartOfUpdate, TrainerServices, inside, is_part_of_update
from .vllm_api.worker import extension_class
from .weight_sync.trainer_link import done_here

if TYPE_CHECKING:
    from .verifying.outcome import EngineVerification
    from .vllm_api.engine_args import EngineArgs

logger = logging.getLogger("ostinato.engine")


class LLM(EngineServices, TrainerServices):
    """A model ready to generate. As a context manager it frees everything at the end."""

    def __init__(self, model: str | None = None, *, progress: bool | None = None, **options: Any) -> None:
        """`model`: a directory, a GGUF file, a hub name; none: SmolLM2-135M-Instruct.

        `options` are the fields of `EngineConfig` and `LLMOptions`, also under the names that vLLM and SGLang
        have for them (docs/flags.md). `progress` shows a bar while capturing (default: when standard error is
        a terminal).
        """
        self.config, self._options = llm_options(model, options)
        self._template = self._options.template
        if self.config.worker_extension_cls is not None:
            self._extension = extension_class(self.config.worker_extension_cls)
        self._engine: TextEngine | None = TextEngine(self.config, progress=progress)
        self._queued: list[RequestOutput] = []

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs) -> LLM:
        """From options as one object."""
        return cls(**engine_args.keywords())

    @property
    def engine(self) -> TextEngine:
        """The engine inside."""
        if self._engine is None:
            raise RequestError("this LLM is closed")
        return self._engine

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: Shown = None,
        lora_request: AskedAdapters = None,
        priority: list[int] | None = None,
        tokenization_kwargs: None = None,
        mm_processor_kwargs: None = None,
    ) -> list[RequestOutput]:
        """Complete the prompts; outputs in their order. Without `sampling_params` the model's own are used
        (`get_default_sampling_params`).

        Of a list, a prompt that cannot be served comes back with `error` set, which is logged, and the others
        are served; a single prompt raises RequestError. `use_tqdm` (vLLM's name) shows a bar over the
        prompts, or is what makes one; default: for lists, when standard error is a terminal. `lora_request`:
        an adapter for all prompts, or a list with one or None for each. The last three are vLLM's and refused
        by name, priorities unless they are 0.
        """
        refuse_given(
            priority=priority,
            tokenization_kwargs=tokenization_kwargs,
            mm_processor_kwargs=mm_processor_kwargs,
        )
        listed, alone = listed_prompts(prompts)
        params = one_each(self._chosen(sampling_params), len(listed))
        shown = use_tqdm if use_tqdm is not None or not alone else False
        adapters = one_adapter_each(lora_request, len(listed))
        return served(self.engine, listed, params, adapters, strict=alone, shown=shown)

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: Shown = None,
        lora_request: AskedAdapters = None,
        chat_template: str | None = None,
        chat_template_content_format: str = "auto",
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
        tokenization_kwargs: None = None,
        mm_processor_kwargs: None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation or several, as `generate` completes prompts.

        `chat_template`: a file or a source instead of the model's own. `add_generation_prompt=False` with
        `continue_final_message=True` goes on with the last message. `tools` are refused where the template
        has no place for them; `chat_template_kwargs` are variables for it. Contents that are lists of parts
        are joined to one text, unless `chat_template_content_format` is openai.
        """
        refuse_given(tokenization_kwargs=tokenization_kwargs, mm_processor_kwargs=mm_processor_kwargs)
        conversations, alone = listed_conversations(messages)
        writer = self._writer(
            chat_template=chat_template,
            chat_template_content_format=chat_template_content_format,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            chat_template_kwargs=chat_template_kwargs,
        )
        params = one_each(self._chosen(sampling_params), len(conversations))
        shown = use_tqdm if use_tqdm is not None or not alone else False
        adapters = one_adapter_each(lora_request, len(conversations))
        return served(
            self.engine, conversations, params, adapters, strict=alone, shown=shown, encode=writer.prompt
        )

    def beam_search(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: BeamSearchParams,
        lora_request: AskedAdapters = None,
        use_tqdm: bool = False,
    ) -> list[BeamSearchOutput]:
        """The likeliest continuations of each prompt, `params.beam_width` of them, best first."""
        engine = self.engine
        listed, _ = listed_prompts(prompts)
        # Loaded once: what is asked for step by step is then there.
        [adapter] = one_adapter_each(lora_request, 1) if isinstance(lora_request, LoRARequest) else [None]
        if lora_request is not None and adapter is None:
            raise RequestError("beam_search takes one lora_request for all prompts")
        if adapter is not None:
            engine.version_of(adapter)
            adapter = replace(adapter, load_inplace=False)
        ids = [engine.prompts.token_ids_of(prompt) for prompt in listed]

        def step(beams: list[dict[str, Any]], wanted: SamplingParams) -> list[RequestOutput]:
            each = [wanted] * len(beams)
            adapters = [adapter] * len(beams)
            return served(self.engine, beams, each, adapters, strict=False, shown=False, is_told=False)

        eos = engine.core.loaded.eos_token_ids
        search = BeamSearch(params, step, eos, self.config.max_logprobs)
        found = search.run(ids, shown=use_tqdm)
        if self.tokenizer is not None:
            for sequence in [each for output in found for each in output.sequences]:
                sequence.text = self.tokenizer.decode(sequence.tokens)
        return found

    def enqueue(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        lora_request: AskedAdapters = None,
    ) -> list[str]:
        """Queue prompts for `wait_for_completion`; their ids. RequestError, and nothing is queued, if one of
        them cannot be served."""
        listed, _ = listed_prompts(prompts)
        params = one_each(self._chosen(sampling_params), len(listed))
        adapters = one_adapter_each(lora_request, len(listed))
        outputs: list[RequestOutput] = []
        with HeldSignals(), self.engine.awaiting() as added:
            for prompt, wanted, asked in zip(listed, params, adapters, strict=True):
                outputs.append(
                    begin(self.engine, prompt, wanted, asked, added, lambda given: given, strict=True)
                )
            self._queued += outputs
            added.clear()
        return [output.request_id for output in outputs]

    def wait_for_completion(self, *, use_tqdm: Shown = None) -> list[RequestOutput]:
        """The outputs of all that was queued, in its order."""
        queued, self._queued = self._queued, []
        with HeldSignals() as signals, self.engine.awaiting() as unfinished:
            engine = self.engine
            with engine.turn:
                unfinished.update(output.request_id for output in queued if not output.finished)
            finish(engine, unfinished, len(queued), use_tqdm, signals)
        return queued

    def stream(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        lora_request: LoRARequest | None = None,
    ) -> Iterator[str]:
        """The text of one completion, piece by piece. Leaving the loop early aborts the request."""
        params = self.get_default_sampling_params() if sampling_params is None else sampling_params
        if getattr(params, "n", 1) != 1:
            raise RequestError(f"a stream is one completion: n must be 1, not {params.n}")
        engine, sent = self.engine, 0
        name = engine.new_id()
        try:
            with HeldSignals(), engine.turn:
                output = engine.add(prompt, params, name, engine.version_of(lora_request))
            while True:
                # Another call may have finished it, so what is left is looked for first.
                with engine.turn:
                    new, is_over = output.outputs[0].text_since(sent), output.finished
                if new:
                    yield new
                    sent += len(new)
                if is_over:
                    break
                with HeldSignals():
                    engine.step_until(lambda: output.finished)
        finally:
            with HeldSignals():
                engine.abort(name)
        if output.error is not None:
            raise RequestError(output.error)

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        use_tqdm: Shown = None,
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        lora_request: AskedAdapters = None,
        tokenization_kwargs: None = None,
        pooling: str | None = None,
    ) -> list[EmbeddingRequestOutput]:
        """Vectors, in `outputs.embedding`: of the last token (`pooling="last"`) or the mean of all
        (`"mean"`; default: as the model's directory says), of length 1 unless `pooling_params` say
        otherwise."""
        refuse_given(tokenization_kwargs=tokenization_kwargs)
        return self.reader(use_tqdm, pooling, lora_request).embed(prompts, pooling_params)

    def encode(
        self,
        prompts: Prompt | Sequence[Prompt],
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        *,
        use_tqdm: Shown = None,
        lora_request: AskedAdapters = None,
        pooling_task: str | None = None,
        tokenization_kwargs: None = None,
    ) -> list[PoolingRequestOutput[PoolingOutput]]:
        """What `embed` or `classify` find (`pooling_task`), as tensors in `outputs.data`."""
        refuse_given(tokenization_kwargs=tokenization_kwargs)
        return self.reader(use_tqdm, lora_request=lora_request).encode(prompts, pooling_params, pooling_task)

    def classify(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        use_tqdm: Shown = None,
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        lora_request: AskedAdapters = None,
        tokenization_kwargs: None = None,
    ) -> list[ClassificationRequestOutput]:
        """How likely each class is, in `outputs.probs`; for models with such a head."""
        refuse_given(tokenization_kwargs=tokenization_kwargs)
        return self.reader(use_tqdm, lora_request=lora_request).classify(prompts, pooling_params)

    def score(
        self,
        data_1: str | Sequence[str],
        data_2: str | Sequence[str],
        /,
        *,
        use_tqdm: Shown = None,
        pooling_params: PoolingParams | None = None,
        lora_request: AskedAdapters = None,
        tokenization_kwargs: None = None,
        chat_template: str | None = None,
    ) -> list[ScoringRequestOutput]:
        """How well texts go together, one with all or pair by pair, in `outputs.score`: what a model with a
        head of one label says of each pair, otherwise the cosine of the texts' vectors."""
        refuse_given(tokenization_kwargs=tokenization_kwargs)
        reader = self.reader(use_tqdm, lora_request=lora_request)
        return reader.score(data_1, data_2, pooling_params, chat_template)

    def reward(self, prompts: Prompt | Sequence[Prompt], **_: Any) -> None:
        """vLLM's, of single tokens: refused, with what to use instead."""
        self.reader().encode(prompts, None, "reward")

    @functools.cached_property
    def llm_engine(self) -> LLMEngine:
        """The engine step by step."""
        return LLMEngine(self)

    def graph_report(self) -> Report:
        """The captured graphs of the forward pass, their replays, and eager steps by reason."""
        return self.engine.core.report()

    def sampling_report(self) -> Report | None:
        """The same for sampling that is not in decode graphs; None for a model that only embeds."""
        sampler = self.engine.core.sampler
        return None if sampler is None else sampler.report()

    def speculation_report(self) -> SpeculationReport | None:
        """What drafts brought, and why there were none; None without speculation."""
        speculation = self.engine.core.runner.speculation
        return None if speculation is None else speculation.summary()

    def step_times(self, *, reset: bool = False) -> StepTimes:
        """CPU time of the steps so far, by part, and on a GPU how long the device waited for a decode step.

        `reset` begins to count anew.
        """
        clock = self.engine.core.clock
        times = clock.read()
        if reset:
            clock.reset()
        return times

    def startup_times(self) -> dict[str, float]:
        """Seconds of the start by phase, in order, and in `total`."""
        return self.engine.core.startup.read()

    def memory_report(self) -> dict[str, int]:
        """Bytes by what they are for: weights, adapters (where they are served), kv, inputs, outputs,
        sampling, activations (of all graphs, in their shared pool), workspace (of libraries, counters of
        kernels) and graphs (what the driver holds for them). Where a rehearsal has sized the KV cache, also
        what it had predicted of the last three."""
        return self.engine.core.parts.memory()

    def verify(self, seed: int = 0, *, progress: bool | None = None) -> EngineVerification:
        """Launch every graph on made-up requests and compare all it leaves with a slow computation that
        shares nothing with it; VerifyError names the graphs that are wrong.

        Takes seconds to a minute and leaves everything as it was, cached prefixes included.
        EngineBusyError while requests are served. `progress` shows a bar over the graphs (default: when
        standard error is a terminal).
        """
        from .verifying.verification import verify

        with self.engine.turn:
            outcome = verify(self.engine.core, seed=seed, progress=progress)
        outcome.raise_if_failed()
        return outcome

    def sleep(self, level: int = 1, mode: str = "abort") -> SleepReport:
        """Give memory back to the device; graphs and addresses stay. See `EngineConfig.enable_sleep_mode`.

        `level` 0: only take no steps. 1: weights go to the host, the KV cache is dropped. 2: both are
        dropped. `mode`: requests that are not finished end now (abort), before (wait), or after `wake_up`,
        computed again (keep). SaverMemoryError: the host has no room for the weights; nothing has changed.
        """
        return self.engine.sleep(level, mode, lambda outputs: None)

    def wake_up(self, tags: Sequence[str] | None = None) -> SleepReport:
        """Take memory back: all, or of the tags weights, kv_cache (with graphs), graphs, scheduling.

        SaverMemoryError: there is too little, and they stay away; call it again. After level 2 nothing is
        generated until weights are loaded. When all is back, a pause is over too.
        """
        return self.engine.wake_up(tags)

    @overload
    def update_weights(
        self, weights: NamedTensors | str | Path, *, version: str | None = None
    ) -> WeightsReport: ...

    @overload
    def update_weights(self, weights: PartOfUpdate, *, version: None = None) -> None: ...

    def update_weights(self, weights: Any, *, version: str | None = None) -> WeightsReport | None:
        """New weights in place of the old: graphs and addresses stay, cached prefixes are forgotten.

        `weights`: a checkpoint's directory, or tensors by the names it would have, in a mapping, a list of
        pairs or an iterator; not necessarily all. All that are given are written or, if one does not fit or
        reading fails, none: WeightsError. Requests under way go on with the KV that they have.

        {"update_info": {...}} is a part of an update that a trainer sends, as with vLLM; it is written by
        `finish_weight_update`.
        """
        if is_part_of_update(weights):
            done_here(self.trainer_link.receive(inside(weights, "update_info")))
            return None
        return self._apply(weights, version)

    @property
    def weight_version(self) -> str:
        """Of the weights: "0" as loaded, then what `update_weights` was given or counted."""
        return self.engine.core.weights.version

    def shared_weights(self) -> dict[str, torch.Tensor]:
        """The weights by the names of the checkpoint, at the addresses that graphs read: a trainer in this
        process may train these very tensors. Call `update_weights({})` when they have changed, and nothing is
        copied. They are there as long as the tag weights is."""
        self.engine.core.sleeper.refuse_without_weights()
        return shared_weights(self.engine.core.loaded.model)

    def is_sleeping(self) -> bool:
        """True from `sleep` until everything is back."""
        return self.engine.core.sleeper.is_sleeping

    def close(self) -> None:
        """Free weights, KV cache and graphs. In a forked child they are the parent's: nothing happens."""
        if self._engine is None or self._engine.turn.is_elsewhere:
            return
        if "trainer_link" in vars(self):
            self.trainer_link.close()
            vars(self).pop("worker", None)
            del self.trainer_link
        self._engine.close()
        memory = self._engine.core.loaded.memory
        self._engine = None
        gc.collect()
        if memory is not None:
            memory.saver.close()  # after the graphs that are in it
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _chosen(
        self, params: SamplingParams | Sequence[SamplingParams] | None
    ) -> SamplingParams | Sequence[SamplingParams]:
        return self.get_default_sampling_params() if params is None else params

    def chat_prompt(self, messages: Messages, **options: Any) -> dict[str, Any]:
        """The prompt of a conversation, as `chat` would write it with these `ChatOptions`."""
        [conversation], _ = listed_conversations(messages)
        return self._writer(**options).prompt(conversation)

    def _writer(self, **options: Any) -> ConversationWriter:
        options["chat_template"] = options.get("chat_template") or self._template
        return ChatOptions(**options).prepared(self.engine)
