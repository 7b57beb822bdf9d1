"""Queues the prompts of one call and steps until they end; other calls' prompts share the steps."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from .adapters.lora_request import LoRARequest
from .delivery.request_progress import RequestProgress, Shown
from .interrupts import HeldSignals
from .outputs import CompletionOutput, RequestOutput
from .parameters.sampling_params import RequestError, SamplingParams
from .prompt_reader import Prompt
from .text_engine import TextEngine, check_params
from .vllm_api.prompts import known_token_ids

logger = logging.getLogger("ostinato.engine")


def served(
    engine: TextEngine,
    prompts: Sequence[Any],
    params: Iterable[SamplingParams],
    adapters: Iterable[LoRARequest | None],
    *,
    strict: bool,
    shown: Shown,
    encode: Callable[[Any], Prompt] = lambda prompt: prompt,
    is_told: bool = True,
) -> list[RequestOutput]:
    """The outputs of these prompts, in their order. `strict`: raise RequestError if one is refused or fails.

    `encode` makes a prompt of each given value; it may refuse. `is_told`: log failures.
    """
    outputs: list[RequestOutput] = []
    # An interrupt must leave nothing of this call behind.
    with HeldSignals() as signals, engine.awaiting() as unfinished:
        for prompt, wanted, asked in zip(prompts, params, adapters, strict=True):
            outputs.append(begin(engine, prompt, wanted, asked, unfinished, encode, strict=strict))
            signals.let_through()
        finish(engine, unfinished, len(outputs), shown, signals)
    if engine.is_closed:
        raise RequestError("this LLM was closed while it served this call")
    if strict and outputs and outputs[0].error is not None:
        raise RequestError(outputs[0].error)
    if is_told:
        for at, output in enumerate(outputs):
            if output.error is not None:
                logger.warning("prompt %d of %d failed: %s", at, len(outputs), output.error)
    return outputs


def finish(engine: TextEngine, unfinished: set[str], total: int, shown: Shown, signals: HeldSignals) -> None:
    """Step until all of these prompts have ended."""
    with RequestProgress(total, shown) as bar:
        bar.update(total - len(unfinished), 0)
        while unfinished:
            before, changed = len(unfinished), engine.step_until(lambda: not unfinished)
            bar.update(before - len(unfinished), len(changed))
            signals.let_through()


def begin(
    engine: TextEngine,
    prompt: Any,
    params: SamplingParams,
    asked: LoRARequest | None,
    unfinished: set[str],
    encode: Callable[[Any], Prompt],
    *,
    strict: bool,
) -> RequestOutput:
    """Queue a prompt and record its name, or say in the output why not."""
    name = engine.new_id()
    try:
        with engine.turn:
            output = engine.add(encode(prompt), params, name, engine.version_of(asked))
            output.lora_request = asked
            unfinished.add(name)
            return output
    except RequestError as error:
        if strict or engine.is_closed or engine.turn.is_elsewhere:
            raise
        return _refused(name, prompt, str(error))


def one_each(params: SamplingParams | Sequence[SamplingParams], count: int) -> list[SamplingParams]:
    """Parameters for each of `count` prompts. Raises RequestError for other types or another number."""
    if isinstance(params, SamplingParams):
        return [params] * count
    if isinstance(params, str) or not isinstance(params, Sequence):
        check_params(params)
    for at, one in enumerate(params):
        check_params(one, f"[{at}]")
    if len(params) != count:
        raise RequestError(f"{len(params)} sampling parameters were given for {count} prompts")
    return list(params)


def _refused(name: str, prompt: Any, error: str) -> RequestOutput:
    text = prompt if isinstance(prompt, str) else None
    known = known_token_ids(prompt)
    return RequestOutput(name, text, known, [CompletionOutput(0, finish_reason="error")], error=error)
