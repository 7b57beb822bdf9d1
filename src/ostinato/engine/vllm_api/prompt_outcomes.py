"""Prompts that are only read, not completed: their hidden states, or why there are none."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ..adapters.lora_request import LoRARequest
from ..delivery.request_progress import RequestProgress, Shown
from ..delivery.served_completion import ServedCompletion
from ..parameters.sampling_params import RequestError
from ..prompt_reader import Prompt
from ..stepping.prompt_states import PromptStates
from ..text_engine import TextEngine


@dataclass(frozen=True)
class PromptOutcome:
    """The result of a prompt that was only read."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    states: PromptStates | None
    """None if `error` is set."""
    error: str | None


def states_of(
    engine: TextEngine,
    prompts: Sequence[Prompt],
    shown: Shown = False,
    let_through: Callable[[], None] = lambda: None,
    adapters: Sequence[LoRARequest | None] | None = None,
) -> list[PromptOutcome]:
    """The model's states for these prompts, each with its adapter, for vectors and scores; `shown`: show a
    progress bar.

    `let_through` is called between steps and may raise.
    """
    kept: list[ServedCompletion | str] = []
    with engine.awaiting() as awaited:
        for prompt, asked in zip(prompts, adapters or [None] * len(prompts), strict=True):
            kept.append(_begin_embedding(engine, prompt, awaited, asked))
        with RequestProgress(len(kept), shown) as bar:
            bar.update(len(kept) - len(awaited), 0)
            while awaited:
                before, changed = len(awaited), engine.step_until(lambda: not awaited)
                bar.update(before - len(awaited), len(changed))
                let_through()
    return [outcome_of(engine, entry) for entry in kept]


def _begin_embedding(
    engine: TextEngine, prompt: Prompt, awaited: set[str], asked: LoRARequest | None
) -> ServedCompletion | str:
    """Queue a prompt and record its name, or return why not."""
    try:
        with engine.turn:
            adapter = engine.version_of(asked)
            served = engine.served_embedding(engine.add_embedding(prompt, adapter=adapter))
            awaited.add(served.whole.request_id)
            return served
    except RequestError as error:
        if engine.is_closed or engine.turn.is_elsewhere:
            raise
        return str(error)


def outcome_of(engine: TextEngine, served: ServedCompletion | str) -> PromptOutcome:
    """The result of a prompt that was embedded, or refused for this reason."""
    if isinstance(served, str):
        return PromptOutcome(engine.new_id(), None, [], None, served)
    whole = served.whole
    states = served.states[0] if served.states and whole.error is None else None
    error = None if states is not None else whole.error or "the request was aborted"
    return PromptOutcome(whole.request_id, whole.prompt, whole.prompt_token_ids, states, error)
