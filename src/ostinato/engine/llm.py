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
from .prompt_reader import Prompt, cache_salt
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
    """A model ready to generate. As a context manager it frees everything when it exits."""

    def __init__(
        self, model: str | Path | None = None, *, progress: bool | None = None, **options: Any
    ) -> None:
        """Load a model and capture its graphs.

        Args:
            model: a directory, a GGUF file or a hub name; default: SmolLM2-135M-Instruct.
            progress: show a progress bar while capturing (default: when standard error is a terminal).
            options: the fields of `EngineConfig` and `LLMOptions`; the names that vLLM and SGLang have for
                them work too (docs/flags.md).
        """
        self.config, self._options = llm_options(model, options)
        self._template = self._options.template
        if self.config.worker_extension_cls is not None:
            self._extension = extension_class(self.config.worker_extension_cls)
        self._engine: TextEngine | None = TextEngine(self.config, progress=progress)
        self._queued: list[RequestOutput] = []

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs) -> LLM:
        """Create an `LLM` from options in one object."""
        return cls(**engine_args.keywords())

    @property
    def engine(self) -> TextEngine:
        """The underlying engine."""
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
        """Complete the prompts and return one output per prompt, in the same order.

        Without `sampling_params` the model's own are used (`get_default_sampling_params`). In a list, a
        prompt that cannot be served returns an output with `error` set, which is also logged, and the others
        are served; a single such prompt raises RequestError.

        `use_tqdm` (vLLM's name): whether to show a progress bar over the prompts, or a function that makes
        one; default: for lists, when standard error is a terminal. `lora_request`: an adapter for all
        prompts, or a list with an adapter or None for each. The last three parameters exist for vLLM's
        signature and are refused by name; a `priority` of 0 is accepted.
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
        """Answer one conversation or several; otherwise like `generate`.

        `chat_template`: a file or the template's text, instead of the model's own.
        `add_generation_prompt=False` with `continue_final_message=True` continues the last message. `tools`
        are refused if the template does not use them; `chat_template_kwargs` are variables for the template.
        Message contents that are lists of parts are joined into one text, unless
        `chat_template_content_format` is openai.
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
        """The `params.beam_width` most likely continuations of each prompt, best first."""
        engine = self.engine
        listed, _ = listed_prompts(prompts)
        # Loaded once, so that it is there for each step.
        [adapter] = one_adapter_each(lora_request, 1) if isinstance(lora_request, LoRARequest) else [None]
        if lora_request is not None and adapter is None:
            raise RequestError("beam_search takes one lora_request for all prompts")
        if adapter is not None:
            engine.version_of(adapter)
            adapter = replace(adapter, load_inplace=False)
        read = [
            {"prompt_token_ids": engine.prompts.token_ids_of(prompt), "cache_salt": cache_salt(prompt)}
            for prompt in listed
        ]

        def step(beams: list[dict[str, Any]], wanted: SamplingParams) -> list[RequestOutput]:
            each = [wanted] * len(beams)
            adapters = [adapter] * len(beams)
            return served(self.engine, beams, each, adapters, strict=False, shown=False, is_told=False)

        eos = engine.core.loaded.eos_token_ids
        search = BeamSearch(params, step, eos, self.config.max_logprobs, engine.core.scheduler.max_len)
        found = search.run(read, shown=use_tqdm)
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
        """Queue prompts for `wait_for_completion` and return their ids. Raises RequestError, and queues
        nothing, if one of them cannot be served."""
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
        """Wait for all queued prompts and return their outputs in the same order."""
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
        """Yield the text of one completion piece by piece. Leaving the loop early aborts the request."""
        params = self.get_default_sampling_params() if sampling_params is None else sampling_params
        if getattr(params, "n", 1) != 1:
            raise RequestError(f"stream() yields one completion: n must be 1, not {params.n}")
        engine, sent = self.engine, 0
        name = engine.new_id()
        try:
            with HeldSignals(), engine.turn:
                output = engine.add(prompt, params, name, engine.version_of(lora_request))
            while True:
                # Another call may have finished it, so look for what is left first.
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
        """Embed the prompts; the vectors are in `outputs.embedding`. They are the state of the last token
        (`pooling="last"`) or the mean over all tokens (`"mean"`; default: what the model's directory says),
        normalised to length 1 unless `pooling_params` turn that off."""
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
        """The results of `embed` or `classify` (`pooling_task`) as tensors, in `outputs.data`."""
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
        """Class probabilities, in `outputs.probs`; for models with a classification head."""
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
        """Similarity of texts, of one text with all others or pair by pair, in `outputs.score`: the score
        that a model whose head has one label gives a pair, otherwise the cosine of the texts' vectors."""
        refuse_given(tokenization_kwargs=tokenization_kwargs)
        reader = self.reader(use_tqdm, lora_request=lora_request)
        return reader.score(data_1, data_2, pooling_params, chat_template)

    def reward(self, prompts: Prompt | Sequence[Prompt], **_: Any) -> None:
        """vLLM's scores of single tokens: refused, with the alternative."""
        self.reader().encode(prompts, None, "reward")

    @functools.cached_property
    def llm_engine(self) -> LLMEngine:
        """The engine behind vLLM's step-by-step interface."""
        return LLMEngine(self)

    def graph_report(self) -> Report:
        """The captured graphs of the forward pass, their replays, and eager steps by reason."""
        return self.engine.core.report()

    def sampling_report(self) -> Report | None:
        """The same for sampling outside of decode graphs; None for a model that only embeds."""
        sampler = self.engine.core.sampler
        return None if sampler is None else sampler.report()

    def speculation_report(self) -> SpeculationReport | None:
        """How many drafts were accepted, and why steps had none; None without speculation."""
        speculation = self.engine.core.runner.speculation
        return None if speculation is None else speculation.summary()

    def step_times(self, *, reset: bool = False) -> StepTimes:
        """CPU time of the steps so far, by part, and on a GPU how long the device waited for a decode step.

        `reset` restarts the counters.
        """
        clock = self.engine.core.clock
        times = clock.read()
        if reset:
            clock.reset()
        return times

    def startup_times(self) -> dict[str, float]:
        """Seconds that each phase of the startup took, in order, and their `total`."""
        return self.engine.core.startup.read()

    def memory_report(self) -> dict[str, int]:
        """Bytes by purpose: weights, adapters (if they are served), kv, inputs, outputs, sampling,
        activations (of all graphs, in their shared pool), workspace (of libraries, and counters of kernels)
        and graphs (held by the driver). If a rehearsal sized the KV cache, also its predictions of the last
        three."""
        return self.engine.core.parts.memory()

    def verify(self, seed: int = 0, *, progress: bool | None = None) -> EngineVerification:
        """Launch every graph on made-up requests and compare everything it writes with a slow, independent
        computation. Raises VerifyError, which names the wrong graphs.

        Takes seconds to a minute and leaves everything as it was, including cached prefixes. Raises
        EngineBusyError while requests are served. `progress` shows a progress bar over the graphs (default:
        when standard error is a terminal).
        """
        from .verifying.verification import verify

        with self.engine.turn:
            outcome = verify(self.engine.core, seed=seed, progress=progress)
        outcome.raise_if_failed()
        return outcome

    def sleep(self, level: int = 1, mode: str = "abort") -> SleepReport:
        """Release memory to the device; graphs and addresses stay. See `EngineConfig.enable_sleep_mode`.

        `level` 0: only stop taking steps; 1: move the weights to the host and drop the KV cache; 2: drop
        both. `mode`: what happens to unfinished requests: abort ends them now, wait finishes them first, keep
        computes them again after `wake_up`. Raises SaverMemoryError if the host has no room for the weights;
        nothing has changed then.
        """
        return self.engine.sleep(level, mode, lambda outputs: None)

    def wake_up(self, tags: Sequence[str] | None = None) -> SleepReport:
        """Restore memory: all of it, or that of the tags weights, kv_cache (includes graphs), graphs,
        scheduling.

        Raises SaverMemoryError if there is too little memory; the tags stay released, and the call can be
        repeated. After level 2 nothing is generated until weights are loaded. When everything is restored, a
        pause ends too.
        """
        return self.engine.wake_up(tags)

    @overload
    def update_weights(
        self, weights: NamedTensors | str | Path, *, version: str | None = None
    ) -> WeightsReport: ...

    @overload
    def update_weights(self, weights: PartOfUpdate, *, version: None = None) -> None: ...

    def update_weights(self, weights: Any, *, version: str | None = None) -> WeightsReport | None:
        """Replace weights in place: graphs and addresses stay, cached prefixes are dropped.

        `weights`: the directory of a checkpoint, or tensors by the names that a checkpoint gives them, as a
        mapping, a list of pairs or an iterator; not necessarily all weights. Either all of them are written
        or, if one does not fit or cannot be read, none: WeightsError. Running requests continue with the KV
        that they have.

        {"update_info": {...}} is one part of an update that a trainer sends, as with vLLM;
        `finish_weight_update` writes it.
        """
        if is_part_of_update(weights):
            done_here(self.trainer_link.receive(inside(weights, "update_info")))
            return None
        return self._apply(weights, version)

    @property
    def weight_version(self) -> str:
        """The version of the weights: "0" as loaded, then what `update_weights` was given or counted."""
        return self.engine.core.weights.version

    def shared_weights(self) -> dict[str, torch.Tensor]:
        """The weights by their names in the checkpoint, at the addresses that graphs read: a trainer in this
        process can train these tensors directly. After changing them, call `update_weights({})`, which copies
        nothing. They are valid while the tag weights has its memory."""
        self.engine.core.sleeper.refuse_without_weights()
        return shared_weights(self.engine.core.loaded.model)

    def is_sleeping(self) -> bool:
        """True from `sleep` until everything is restored."""
        return self.engine.core.sleeper.is_sleeping

    def close(self) -> None:
        """Free weights, KV cache and graphs. Does nothing in a forked child: they are the parent's."""
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
            memory.saver.close()  # after the graphs, whose memory is in it
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
        """The prompt that `chat` would make of a conversation with these `ChatOptions`."""
        [conversation], _ = listed_conversations(messages)
        return self._writer(**options).prompt(conversation)

    def _writer(self, **options: Any) -> ConversationWriter:
        options["chat_template"] = options.get("chat_template") or self._template
        return ChatOptions(**options).prepared(self.engine)
