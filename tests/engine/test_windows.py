"""Models that look back through windows only: pages before them are given back while a request runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ostinato.engine.llm import LLM
from ostinato.engine.parameters.sampling_params import RequestError, SamplingParams
from ostinato.engine.scheduling.request import Request
from ostinato.engine.scheduling.scheduled_step import ScheduledStep
from ostinato.engine.scheduling.scheduler import Scheduler
from ostinato.engine.scheduling.scheduler_config import SchedulerConfig, window_of

from .conftest import TinyModel, prompts_of
from .test_scheduler import EOS, VOCAB, FakeDevice, PoisoningAllocator, slot_value

WINDOW, SIZE = 40, 16


def next_token(values: list[int]) -> int:
    return hash(tuple(values)) % (VOCAB - 1) + 1


class WindowDevice(FakeDevice):
    """Sees the last `WINDOW` positions; whoever asks for an earlier one is caught at page 0."""

    def run(self, step: ScheduledStep) -> list[int]:
        for update in step.page_updates:
            self.page_table[update.row, update.first : update.first + len(update.pages)] = update.pages
        sampled = [0] * step.num_requests
        for at in range(step.num_requests):
            begin = int(step.query_starts[at])
            for offset in range(begin, begin + int(step.num_new_tokens[at])):
                self.write(step, offset)
                self.values(int(step.rows[at]), int(step.positions[offset]) + 1)
            if step.samples[at]:
                row = int(step.rows[at])
                sampled[at] = self.last_token[row] = next_token(self.values(row, int(step.seq_lens[at])))
        return sampled

    def values(self, row: int, context: int) -> list[int]:
        """What the last token of a context sees; each at a page that is there."""
        return [self.memory[self.slot(row, at)] for at in range(max(0, context - WINDOW), context)]


def run_alone(prompt: list[int], count: int) -> list[int]:
    values: list[int] = []
    tokens = list(prompt)
    while True:
        for at in range(len(values), len(tokens)):
            values.append(slot_value(values[-1] if values else 0, tokens[at], at, 0))
        if len(tokens) == len(prompt) + count:
            return tokens[len(prompt) :]
        tokens.append(next_token(values[-WINDOW:]))


class Engine:
    """A scheduler with windows, and a device that sees nothing else."""

    def __init__(self, num_pages: int, **options: Any) -> None:
        limits = {"max_running": 4, "max_batched_tokens": 48, "max_model_len": 1200, "window": WINDOW}
        self.config = SchedulerConfig(**limits | options)
        self.pages = PoisoningAllocator(num_pages, SIZE)
        self.scheduler = Scheduler(self.config, self.pages)
        self.device = WindowDevice(self.pages, 4, self.pages.pages_for(self.scheduler.max_len))
        self.pages.device = self.device
        self.most = 0
        """Pages that one request had at a time."""

    def add(self, prompt: list[int], count: int) -> Request:
        params = SamplingParams(max_tokens=count, ignore_eos=True)
        request = Request(f"r{self.scheduler._waiting.num_queued}", np.array(prompt), params, EOS)
        self.scheduler.add(request)
        return request

    def drain(self) -> None:
        launched: list[tuple[ScheduledStep, list[int]]] = []
        for _ in range(20000):
            if not self.scheduler.has_work:
                break
            step = self.scheduler.schedule() if len(launched) <= self.config.lookahead else None
            if step is not None:
                launched.append((step, self.device.run(step)))
            for request in self.scheduler.running:
                self.most = max(self.most, sum(page > 0 for page in request.pages))
            if launched and (step is None or len(launched) > self.config.lookahead):
                self.scheduler.complete(*launched.pop(0))
            self.scheduler.check_integrity()
        assert not self.scheduler.has_work
        assert self.pages.num_free == self.pages.num_usable


MOST = -(-(WINDOW + 128 + 48) // SIZE) + 3


@pytest.mark.parametrize("lookahead", [0, 1])
@pytest.mark.parametrize("prefix_caching", [False, True])
@pytest.mark.parametrize("num_pages", [MOST + 1, 40, 400])
def test_tokens_are_the_same_and_pages_are_those_of_the_windows(
    num_pages: int, prefix_caching: bool, lookahead: int
) -> None:
    """With fewer pages than the requests are long, preemptions included."""
    engine = Engine(num_pages, prefix_caching=prefix_caching, lookahead=lookahead)
    draw = np.random.default_rng(3)
    beginning = draw.integers(1, VOCAB, 400).tolist()
    asked = [(beginning + draw.integers(1, VOCAB, 30).tolist(), 200), ([5, 6], 300), (beginning, 20)]
    asked += [(draw.integers(1, VOCAB, 100).tolist(), 150), ([*beginning, 3], 60)]
    requests = [engine.add(*each) for each in asked]
    engine.drain()
    for request, (prompt, count) in zip(requests, asked, strict=True):
        assert request.output_ids == run_alone(prompt, count)
    # The step under way is not committed, and as long as pages are plenty a decode takes four at a time.
    assert engine.most <= MOST + lookahead * 4 + 4 < 630 // SIZE
    if prefix_caching and num_pages == 400:
        assert engine.pages.statistics.hit_tokens > 400


def test_a_request_may_be_longer_than_the_cache() -> None:
    engine = Engine(MOST + 1)
    assert engine.scheduler.max_len == 1200 > engine.pages.num_usable * SIZE
    prompt = np.random.default_rng(1).integers(1, VOCAB, 900).tolist()
    request = engine.add(prompt, 300)
    engine.drain()
    assert request.output_ids == run_alone(prompt, 300)


def test_with_fewer_pages_than_a_step_and_a_window_take_it_may_not() -> None:
    engine = Engine(MOST)
    assert engine.scheduler.max_len == (MOST - 1) * SIZE
    with pytest.raises(RequestError, match="cannot fit"):
        engine.add([1] * 900, 10)


def test_a_model_has_a_window_if_all_its_layers_have() -> None:
    assert window_of((40, 16), 100) == 40
    assert window_of((40, None), 100) is None
    assert window_of((40, 100), 100) is None
    assert window_of((None,), 100) is None


OPTIONS: dict[str, Any] = {
    "max_running_requests": 3,
    "chunked_prefill_size": 32,
    "cuda_graph_bs": [1, 2, 3],
    "cuda_graph_prefill_tokens": [16, 32],
    "max_model_len": 512,
    "enable_cudagraph_gc": True,
}


@pytest.fixture(scope="module")
def mistral(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    """All its layers have a window."""
    directory: Path = tmp_path_factory.mktemp("mistral")
    return TinyModel(directory, "Mistral", sliding_window=24, max_position_embeddings=512, head_dim=8)


@pytest.mark.parametrize("mode", ["full-and-piecewise", pytest.param("full", marks=pytest.mark.slow)])
def test_an_answer_longer_than_the_whole_cache(mistral: TinyModel, mode: str) -> None:
    """Beside another one; then once more, from the prefix cache."""
    [long, short] = prompts_of((60, 5), seed=2)
    with LLM(mistral.directory, cuda_graph_mode=mode, num_pages=22, **OPTIONS) as llm:
        scheduler = llm.engine.core.scheduler
        for count in (400, 30):
            params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
            outputs = [llm.engine.add(long, params), llm.engine.add(short, params)]
            while llm.engine.has_work:
                llm.engine.step()
                scheduler.check_integrity()
            for prompt, output in zip((long, short), outputs, strict=True):
                assert_greedy(mistral, prompt["prompt_token_ids"], output.outputs[0].token_ids, count)
        assert scheduler.pages.num_free == 21
        assert llm.graph_report().eager_steps == {}


def assert_greedy(model: TinyModel, prompt: list[int], tokens: list[int], count: int) -> None:
    """Each token is the likeliest behind all before it, in one pass over the whole."""
    assert len(tokens) == count
    logits = model.reference(torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1]
    chosen = logits.gather(1, torch.tensor(tokens)[:, None])[:, 0]
    assert (logits.max(-1).values - chosen).max() < 1e-3
