"""`LLM`: load a model, generate, chat, embed; offline and in this process."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import gc
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch

from ostinato.graphs import ConfigError, Report

from .config import EngineConfig
from .delivery.request_progress import RequestProgress
from .outputs import CompletionOutput, EmbeddingOutput, RequestOutput
from .peer_options.translation import translated
from .sampling_params import RequestError, SamplingParams
from .sleeping.sleeper import SleepReport
from .stepping.times import StepTimes
from .text_engine import Prompt, TextEngine

if TYPE_CHECKING:
    from .verifying.outcome import EngineVerification

Messages = Sequence[Mapping[str, Any]]


def engine_config(model: str | None, options: Mapping[str, Any]) -> EngineConfig:
    """The configuration from keywords, ours or those of vLLM and SGLang; ConfigError for one that does not
    exist."""
    options = translated(options)
    names = [entry.name for entry in dataclasses.fields(EngineConfig)]
    for name in options:
        if name not in names:
            near = difflib.get_close_matches(name, names, n=1)
            advice = f"did you mean {near[0]}?" if near else f"there are {', '.join(names)}"
            raise ConfigError(f"unknown option {name!r}: {advice}")
    lists = {name: tuple(value) for name, value in options.items() if isinstance(value, list)}
    return EngineConfig(model=model, **{**options, **lists})


class LLM:
    """A model ready to generate. As a context manager it frees everything at the end."""

    def __init__(self, model: str | None = None, *, progress: bool | None = None, **options: Any) -> None:
        """`model`: a directory, a GGUF file, a hub name; none: SmolLM2-135M-Instruct.

        `options` are the fields of `EngineConfig`. `progress` shows a bar while capturing (default: when
        standard error is a terminal).
        """
        self.config = engine_config(model, options)
        self._engine: TextEngine | None = TextEngine(self.config, progress=progress)

    @property
    def engine(self) -> TextEngine:
        """The engine inside."""
        if self._engine is None:
            raise RequestError("this LLM is closed")
        return self._engine

    @property
    def _awake_engine(self) -> TextEngine:
        self.engine.core.refuse_if_asleep()
        return self.engine

    @property
    def tokenizer(self) -> Any:
        """The model's tokenizer; None where it has none."""
        return self.engine.tokenizer

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool | None = None,
    ) -> list[RequestOutput]:
        """Complete the prompts; outputs in their order. Without `sampling_params` the model's own are used
        (`get_default_sampling_params`).

        Of a list, a prompt that cannot be served comes back with `error` set and the others are served; a
        single prompt raises RequestError. `use_tqdm` (vLLM's name) shows a bar over the prompts; default:
        for lists, when standard error is a terminal.
        """
        params = self.get_default_sampling_params() if sampling_params is None else sampling_params
        if isinstance(prompts, str | Mapping):
            return self._run([prompts], _one_each(params, 1), strict=True, shown=bool(use_tqdm))
        listed = list(prompts)
        return self._run(listed, _one_each(params, len(listed)), strict=False, shown=use_tqdm)

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool | None = None,
        **template_options: Any,
    ) -> list[RequestOutput]:
        """Answer one conversation or several; further keywords reach the chat template."""
        single = not messages or isinstance(messages[0], Mapping)
        conversations: list[Any] = [messages] if single else list(messages)
        encode = functools.partial(self.engine.encode_chat, **template_options)
        asked = self.get_default_sampling_params() if sampling_params is None else sampling_params
        params = _one_each(asked, len(conversations))
        shown = bool(use_tqdm) if single else use_tqdm
        return self._run(conversations, params, strict=single, shown=shown, encode=encode)

    def stream(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> Iterator[str]:
        """The text of one completion, piece by piece. Leaving the loop early aborts the request."""
        engine, sent = self._awake_engine, 0
        output = engine.add(prompt, sampling_params or self.get_default_sampling_params())
        try:
            while True:
                # Another call may have finished it, so what is left is looked for first.
                new, is_over = output.outputs[0].text_since(sent), output.finished
                if new:
                    yield new
                    sent += len(new)
                if is_over:
                    break
                engine.step()
        finally:
            engine.abort(output.request_id)
        if output.error is not None:
            raise RequestError(output.error)

    def get_default_sampling_params(self) -> SamplingParams:
        """What requests without parameters are sampled with: see `EngineConfig.generation_config`."""
        return SamplingParams(**self.engine.core.loaded.default_sampling)

    def embed(self, prompts: Prompt | Sequence[Prompt], *, pooling: str = "last") -> list[EmbeddingOutput]:
        """Vectors of length 1: of the last token (`pooling="last"`) or the mean of all (`"mean"`)."""
        if isinstance(prompts, str | Mapping):
            [output] = self._awake_engine.embed([prompts], pooling)
            if output.error is not None:
                raise RequestError(output.error)
            return [output]
        return self._awake_engine.embed(list(prompts), pooling)

    def graph_report(self) -> Report:
        """The captured graphs of the forward pass, their replays, and eager steps by reason."""
        return self.engine.core.report()

    def sampling_report(self) -> Report | None:
        """The same for sampling that is not in decode graphs; None for a model that only embeds."""
        sampler = self.engine.core.sampler
        return None if sampler is None else sampler.report()

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
        """Bytes by what they are for: weights, kv, inputs, outputs, sampling, activations (of all graphs, in
        their shared pool), workspace (of libraries) and graphs (what the driver holds for them)."""
        return self.engine.core.memory()

    def verify(self, seed: int = 0, *, progress: bool | None = None) -> EngineVerification:
        """Launch every graph on made-up requests and compare all it leaves with a slow computation that
        shares nothing with it; VerifyError names the graphs that are wrong.

        Takes seconds to a minute and leaves everything as it was, cached prefixes included.
        EngineBusyError while requests are served. `progress` shows a bar over the graphs (default: when
        standard error is a terminal).
        """
        from .verifying.verification import verify

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
        generated until weights are loaded.
        """
        return self.engine.wake_up(tags)

    def is_sleeping(self) -> bool:
        """True from `sleep` until everything is back."""
        return self.engine.core.sleeper.is_sleeping

    def close(self) -> None:
        """Free weights, KV cache and graphs."""
        if self._engine is None:
            return
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

    def _run(
        self,
        prompts: Sequence[Any],
        params: Iterable[SamplingParams],
        *,
        strict: bool,
        shown: bool | None,
        encode: Callable[[Any], Prompt] = lambda prompt: prompt,
    ) -> list[RequestOutput]:
        """`encode` makes a prompt of what was given; it may refuse."""
        engine = self._awake_engine
        outputs: list[RequestOutput] = []
        for prompt, wanted in zip(prompts, params, strict=True):
            try:
                outputs.append(engine.add(encode(prompt), wanted))
            except RequestError as error:
                if strict:
                    raise
                outputs.append(_refused(engine.new_id(), prompt, str(error)))
        unfinished = {output.request_id for output in outputs if not output.finished}
        try:
            with RequestProgress(len(outputs), shown) as bar:
                bar.update(len(outputs) - len(unfinished), 0)
                while unfinished and engine.has_work:
                    changed = engine.step()
                    ended = unfinished.intersection(output.request_id for output in engine.ended)
                    unfinished -= ended
                    bar.update(len(ended), len(changed))
        finally:
            # After an interrupt nothing of this call stays behind.
            for output in outputs:
                engine.abort(output.request_id)
        if strict and outputs and outputs[0].error is not None:
            raise RequestError(outputs[0].error)
        return outputs


def _one_each(params: SamplingParams | Sequence[SamplingParams], count: int) -> list[SamplingParams]:
    if isinstance(params, SamplingParams):
        return [params] * count
    if len(params) != count:
        raise RequestError(f"{len(params)} sampling parameters were given for {count} prompts")
    return list(params)


def _refused(name: str, prompt: Any, error: str) -> RequestOutput:
    text = prompt if isinstance(prompt, str) else None
    ids = prompt.get("prompt_token_ids") if isinstance(prompt, Mapping) else None
    known = list(ids) if isinstance(ids, list | tuple) else []
    return RequestOutput(name, text, known, [CompletionOutput(0, finish_reason="error")], error=error)
