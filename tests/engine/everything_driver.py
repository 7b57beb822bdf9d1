"""Does to an engine whatever it is told, keeps account of what each request was computed with, and compares
all answers with those of a plain engine in the end."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any
from unittest.mock import patch

import pytest
import torch

from ostinato import LLM, LoRARequest, RequestError, SamplingParams
from ostinato.engine.delivery.served_completion import ServedCompletion
from ostinato.engine.scheduling.request import RequestStatus
from ostinato.engine.sleeping.sleeper import EngineAsleepError

from .asked_alone import Answer, Question, Turn, assert_same
from .everything_world import World
from .test_engine_greedy import assert_all_back

NAMES = ("a", "b", "c")
PARTS = ("schedule", "send", "run", "launch", "join", "update_pages", "draft", "complete", "take_in")
"""Of a step, which can fail."""


@dataclass
class Asked:
    """One completion, and what is known of it."""

    question: Question
    served: ServedCompletion
    adapter_name: str | None
    num_preemptions: int = 0
    is_unknown: bool = False
    """Whether nobody can say what comes: a part of a prompt was computed with earlier weights."""
    known: int = 0
    """Tokens that were there before."""

    @property
    def is_over(self) -> bool:
        return self.served.output.finish_reason is not None or self.served.request.is_finished

    @property
    def num_tokens(self) -> int:
        return len(self.served.token_ids)

    def computed_again(self, weights: int, tokens: int) -> None:
        """All of it, with these weights, by the time it has so many tokens."""
        if self.is_unknown and not self.known:
            self.question, self.is_unknown = replace(self.question, weights=weights, turns=()), False
        elif self.question.turns:
            self._turn(Turn(tokens, weights, is_computed_again=True))

    def gets_weights(self, weights: int) -> None:
        """From now on."""
        request, tokens = self.served.request, self.num_tokens
        if request.status is not RequestStatus.RUNNING:
            if tokens:
                self._turn(Turn(tokens, weights, is_computed_again=True))
            else:
                self.computed_again(weights, 0)
                self.question = replace(self.question, weights=weights)
        elif not tokens or request.num_computed < request.num_tokens - 1 or request.grammar is not None:
            self.is_unknown, self.known = True, tokens
        else:
            self._turn(Turn(tokens, weights, is_computed_again=False))

    def _turn(self, turn: Turn) -> None:
        if not self.is_unknown:
            self.question = replace(self.question, turns=(*self.question.turns, turn))


@dataclass
class Driver:
    """One run of an engine."""

    llm: LLM
    world: World
    weights: int = 0
    loaded: dict[str, int] = field(default_factory=dict)
    """Contents of adapters by name."""
    asked: list[Asked] = field(default_factory=list)
    num_planted: int = 0
    num_turns: int = 0

    def __post_init__(self) -> None:
        self.llm.update_weights(self.world.weights[0])

    def run(self, actions: list[tuple[str, dict[str, Any]]]) -> None:
        """Do these one after the other, then let all requests end, and judge."""
        with self._watched():
            for name, arguments in actions:
                getattr(self, name)(**arguments)
                self._look()
                self.llm.engine.core.scheduler.check_integrity()
            self._let_all_end()
        self._judge()

    # -- what can be done --------------------------------------------------------------------------

    def ask(self, kind: str, prompt: int, tokens: int, adapter: str | None) -> None:
        engine, text = self.llm.engine, self.world.prompts[prompt]
        params = None
        if kind != "embedding":
            given = {"temperature": 0.0, "max_tokens": tokens, **self.world.kinds[kind]}
            given["max_tokens"] = max(tokens, given.get("min_tokens", 0))
            params = SamplingParams(**given)
        asked = None if adapter not in self.loaded else LoRARequest(adapter, 1 + NAMES.index(adapter))
        contents = None if asked is None else self.loaded[asked.lora_name]
        version, ids = engine.version_of(asked), {"prompt_token_ids": list(text)}
        try:
            if params is None:
                name = engine.add_embedding(ids, adapter=version)
            else:
                name = engine.add(ids, params, adapter=version).request_id
        except RequestError as error:
            assert "reserved for pinned adapters" in str(error)  # noqa: PT017
            assert sum(each.is_pinned for each in engine.adapters.listed()) == 2
            return
        for served in engine._served[name]:
            question = Question(text, served.request.params, contents, self.weights)
            self.asked.append(Asked(question, served, None if asked is None else adapter))

    def step(self, times: int) -> None:
        for _ in range(times):
            if self.llm.engine.core.sleeper.why_no_step is not None:
                with pytest.raises(EngineAsleepError):
                    self.llm.engine.step()
                return
            self.llm.engine.step()

    def abort(self, which: int) -> None:
        under_way = [one for one in self.asked if not one.is_over]
        if under_way:
            one = under_way[which % len(under_way)]
            self.llm.engine.abort(one.served.whole.request_id)
            assert one.is_over

    def sleep(self, level: int, mode: str) -> None:
        if not self.llm.config.enable_sleep_mode:
            level = 0
        self.llm.sleep(level, mode)

    def wake_up(self, tags: list[str] | None) -> None:
        self.llm.wake_up(tags)

    def pause(self, mode: str, clear_cache: bool) -> None:
        self.llm.pause_generation(mode=mode, clear_cache=clear_cache)

    def resume(self) -> None:
        self.llm.resume_generation()

    def flush(self, running: bool) -> None:
        assert self.llm.reset_prefix_cache(reset_running_requests=running)

    def update(self, weights: int, as_iterator: bool) -> None:
        new: Any = self.world.weights[weights]
        try:
            self.llm.update_weights(iter(new.items()) if as_iterator else new)
        except EngineAsleepError:
            assert "weights" in self.llm.engine.core.sleeper._away
            return
        self._look()
        if weights != self.weights:
            self.weights = weights
            for one in self.asked:
                if not one.is_over:
                    one.gets_weights(weights)

    def load(self, name: str, contents: int) -> None:
        if not self.llm.config.serves_adapters:
            return
        path = self.world.adapters[contents]
        assert self.llm.add_lora(LoRARequest(name, 1 + NAMES.index(name), path, load_inplace=True))
        self.loaded[name] = contents

    def unload(self, name: str) -> None:
        if name not in self.loaded:
            return
        try:
            assert self.llm.remove_lora(1 + NAMES.index(name))
            del self.loaded[name]
        except RequestError:
            assert any(one.adapter_name == name and not one.is_over for one in self.asked)

    def pin(self, name: str) -> None:
        if name in self.loaded:
            try:
                assert self.llm.pin_lora(1 + NAMES.index(name))
            except RequestError as error:
                assert "pin" in str(error)  # noqa: PT017

    def fail(self, part: str, at: int, behind: bool) -> None:
        """Let the next steps fail in one of their parts."""
        core = self.llm.engine.core
        owner: Any = {
            "send": core.runner.rows,
            "run": core.runner,
            "launch": core.sampler,
            "join": core.sampler,
            "update_pages": core.runner,
            "draft": core.runner.speculation,
            "schedule": core.scheduler,
            "complete": core.scheduler,
            "take_in": self.llm.engine._delivery,
        }[part]
        if owner is None or core.sleeper.why_no_step is not None:
            return
        real, calls = getattr(owner, part), iter(range(1000))

        def failing(*arguments: Any, **options: Any) -> Any:
            is_due = next(calls) == at
            found = real(*arguments, **options) if behind or not is_due else None
            if is_due:
                self.num_planted += 1
                raise RuntimeError("planted")
            return found

        with patch.object(owner, part, failing):
            self.step(at + 2)

    # -- the account -------------------------------------------------------------------------------

    @contextmanager
    def _watched(self) -> Iterator[None]:
        """Look at what every step did, whoever takes it."""
        engine = self.llm.engine
        step = engine.step

        def watched() -> Any:
            self.num_turns += 1
            assert self.num_turns < 3_000, "somebody is never served"
            before = {id(one): one.num_tokens for one in self.asked}
            found = step()
            self._look(before)
            engine.core.scheduler.check_integrity()
            return found

        with patch.object(engine, "step", watched):
            yield

    def _look(self, before: dict[int, int] | None = None) -> None:
        """Who was preempted; in a step that is done before it brings tokens."""
        for one in self.asked:
            count = one.served.request.num_preemptions
            if count > one.num_preemptions:
                one.num_preemptions = count
                one.computed_again(self.weights, (before or {}).get(id(one), one.num_tokens))

    def _let_all_end(self) -> None:
        self.wake_up(None)
        self.resume()
        if self.llm.engine.core.sleeper.why_no_weights is not None:
            self.update(self.weights, False)
        while self.llm.engine.has_work:
            self.llm.engine.step()

    def _judge(self) -> None:
        for one in self.asked:
            served = one.served
            assert served.output.finish_reason is not None, "a lost request"
            found = Answer.of(served.output, served.whole.prompt_logprobs)
            if found.finish_reason == "error":
                assert self.num_planted
                assert "planted" in (served.whole.error or "")
            if one.is_unknown:
                continue
            if one.question.params is None and served.states:
                states = served.states[0]
                found.states = torch.stack([states.mean, states.last])
            expected = self.world.alone.says(one.question)
            assert_same(found, expected, knows_prompt=not one.question.turns)
        assert_all_back(self.llm)
        for name in list(self.loaded):
            assert self.llm.remove_lora(1 + NAMES.index(name))
        self.llm.engine.core.scheduler.flush_prefix_cache()
        if self.llm.config.serves_adapters:
            assert set(self.llm.engine.adapters.slots.tenants) == {None}
