"""Speculation from end to end, and what its parts cost, beside plain decode.

python -m ostinato.bench.speculation benchmarks/results/speculation-h200.json [--model M] [--method eagle3]

Random weights: acceptance is synthetic, three tokens a step on average with four drafts. Tokens a second of
engines with and without drafts over batches of one size; each batch with the number of drafts that the engine
chooses, and with all four. Single graphs, replayed alone: a plain step, and by that what verifies four
drafts and the chain that makes them, with its kernels by time. The result is written after every row.
"""

import argparse
import json
import random
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch

from ostinato import LLM, SamplingParams
from ostinato.engine.stepping.model_runner import ModelRunner
from ostinato.graphs import CudaGraphRunner

from ..tools.machine import machine
from ..tools.replays import filled_graph, replay_us
from ..tools.results import write_json
from .repository import MODELS

DRAFTS = 4
RATES = [0.8, 0.6, 0.4, 0.2]
"""Of each draft with all before it: 3 tokens a step."""
BATCHES = (1, 8, 64)
INPUT_LEN, OUTPUT_LEN, REPEATS = 64, 256, 2
WANTED = {1: 2.3, 8: 1.8, 64: 1.0}
"""Times as many tokens a second as without drafts, by batch."""


def head_folder(place: Path, model: str, method: str) -> str:
    """A head for the model, of which there is only a shape."""
    config = json.loads((MODELS / model / "config.json").read_text())
    config["num_hidden_layers"] = 1
    if method == "eagle3":
        config |= {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": 32000}
    place.mkdir()
    (place / "config.json").write_text(json.dumps(config))
    return str(place)


def engine(model: str, asked: dict[str, Any] | None) -> LLM:
    """One whose graphs are for the batches that are measured."""
    return LLM(
        str(MODELS / model),
        load_format="dummy",
        max_model_len=1024,
        max_running_requests=max(BATCHES),
        cuda_graph_bs=BATCHES,
        cuda_graph_prefill_tokens=(512, 4096),
        num_pages=max(BATCHES) * 64 + 1,
        enable_prefix_caching=False,
        speculative_config=asked,
        progress=False,
    )


def throughput(llm: LLM, batch: int) -> dict[str, Any]:
    """Tokens a second of the best repeat, without prompts: two lengths of output, and their difference."""
    draw, vocab = random.Random(batch), llm.engine.core.loaded.model.config.vocab_size
    prompts = [{"prompt_token_ids": [draw.randrange(vocab) for _ in range(INPUT_LEN)]} for _ in range(batch)]
    short = OUTPUT_LEN // 4

    def seconds(tokens: int) -> float:
        params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
        began = time.perf_counter()
        outputs = llm.generate(prompts, params, use_tqdm=False)
        assert all(len(output.outputs[0].token_ids) == tokens for output in outputs)
        return time.perf_counter() - began

    seconds(OUTPUT_LEN)
    llm.step_times(reset=True)
    found = min(seconds(OUTPUT_LEN) - seconds(short) for _ in range(REPEATS))
    idle = llm.step_times().idle_share
    return {"tokens_per_second": batch * (OUTPUT_LEN - short) / found, "idle_share": idle}


def with_drafts(llm: LLM, batch: int) -> dict[str, Any]:
    """The same, and how drafts fared meanwhile."""
    before = llm.speculation_report()
    found = throughput(llm, batch)
    after = llm.speculation_report()
    assert before is not None
    assert after is not None
    verified = after.drafts.num_drafts - before.drafts.num_drafts
    accepted = after.drafts.num_accepted_tokens - before.drafts.num_accepted_tokens
    drafted = after.drafts.num_draft_tokens - before.drafts.num_draft_tokens
    return {
        **found,
        "mean_acceptance_length": 1 + accepted / verified if verified else 1.0,
        "mean_drafts": drafted / verified if verified else 0.0,
        "eager": after.eager_drafts,
    }


def kernels(runner: ModelRunner, graphs: CudaGraphRunner, batch: int) -> list[tuple[str, float, int]]:
    """Those of a chain by time: name, microseconds of a replay, launches."""
    with runner.unchanged():
        graph = filled_graph(graphs, batch, DRAFTS)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            for _ in range(10):
                graphs.launch(graph)
            torch.cuda.synchronize()
    times: Counter[str] = Counter()
    launches: Counter[str] = Counter()
    for event in profile.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            times[event.name[:60]] += event.device_time_total
            launches[event.name[:60]] += 1
    return [(name, round(took / 10, 2), launches[name] // 10) for name, took in times.most_common(14)]


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("result", type=Path)
    parser.add_argument("--model", default="llama-3.1-8b")
    parser.add_argument("--method", default="eagle3", choices=["eagle", "eagle3", "ngram"])
    given = parser.parse_args()
    result: dict[str, Any] = {"machine": machine(), "model": given.model, "method": given.method}

    def keep(name: str, row: Any, value: Any) -> None:
        result.setdefault(name, {})[row] = value
        write_json(result, given.result)
        print(f"{time.perf_counter() - began:5.1f} s", name, row, json.dumps(value), flush=True)

    began = time.perf_counter()
    with engine(given.model, None) as llm:
        for batch in BATCHES:
            keep("plain", batch, throughput(llm, batch))
    asked: dict[str, Any] = {"method": given.method, "num_speculative_tokens": DRAFTS}
    asked |= {"rejection_sample_method": "synthetic", "synthetic_acceptance_rates": RATES}
    with tempfile.TemporaryDirectory() as place:
        if given.method != "ngram":
            asked["model"] = head_folder(Path(place) / "head", given.model, given.method)
        with engine(given.model, asked) as llm:
            keep("start", "seconds", llm.startup_times())
            for batch in BATCHES:
                keep("adaptive", batch, with_drafts(llm, batch))
                rates = (result[kind][batch]["tokens_per_second"] for kind in ("adaptive", "plain"))
                found = round(next(rates) / next(rates), 3)
                keep("times plain", batch, {"found": found, "wanted": WANTED[batch]})
            runner = llm.engine.core.runner
            assert runner.speculation is not None
            chains = runner.speculation.drafter.graphs
            for batch in BATCHES:
                plain_us = replay_us(runner, runner.graphs, batch, 1)
                verify = replay_us(runner, runner.graphs, batch, 1 + DRAFTS) / plain_us
                chain = replay_us(runner, chains, batch, DRAFTS) / plain_us
                keep("graphs", batch, {"plain_us": plain_us, "verify": verify, "chain": chain})
            for batch in (1, 8):
                keep("chain kernels", batch, kernels(runner, chains, batch))
        with engine(given.model, {**asked, "disable_adaptive": True}) as llm:
            for batch in (1, 8):
                keep("all drafts", batch, with_drafts(llm, batch))


if __name__ == "__main__":
    main()
