"""Time of a decode step in which few requests ask for more than plain sampling, beside plain ones only.

python -m ostinato.bench.mixed_kinds benchmarks/results/mixed-kinds-h200.json

One request in 32 of each kind, alone and all together; the others are greedy. One engine, random weights,
prompts of 128 tokens, the cases in turns. A step is timed on the host, which is ahead of the device, from its
beginning to that of the next; median over the steps of all repeats, prompts among them. Kernels of a step
come from the profiler, of one case and of plain steps: those of a long answer less those of a short one.
"""

import argparse
import random
import statistics
import time
from pathlib import Path
from typing import Any

import torch

from ostinato import LLM, SamplingParams

from ..tools.machine import machine
from ..tools.results import write_json
from .repository import MODELS

BATCHES = (32, 256)
EVERY = 32
INPUT_LEN, OUTPUT_LEN, REPEATS = 128, 96, 4
SHORT, LONG = 8, 40
"""Tokens of answers under the profiler."""
LIMIT = 0.05
PLAIN, ALL = "plain", "all"
KINDS: dict[str, dict[str, Any]] = {
    "penalties": {"temperature": 0, "frequency_penalty": 0.5, "repetition_penalty": 1.1},
    "logprobs": {"temperature": 0, "logprobs": 5},
    "min_tokens": {"temperature": 0, "min_tokens": OUTPUT_LEN, "stop_token_ids": [5]},
    "top-p": {"temperature": 1.0, "seed": 1, "top_p": 0.9},
}
CASES: dict[str, tuple[str, ...]] = {PLAIN: (), **{kind: (kind,) for kind in KINDS}, ALL: tuple(KINDS)}


def params_of(case: str, batch: int, tokens: int) -> list[SamplingParams]:
    """The first of every 32 requests ask for the kinds of the case, one each."""
    asked = [KINDS[kind] for kind in CASES[case]]
    found = []
    for number in range(batch):
        place = number % EVERY
        own = dict(asked[place]) if place < len(asked) else {"temperature": 0}
        if "min_tokens" in own:
            own["min_tokens"] = tokens
        found.append(SamplingParams(**own, max_tokens=tokens, ignore_eos=True))
    return found


def prompts_of(batch: int, vocab: int) -> list[dict[str, list[int]]]:
    """Random ids."""
    draw = random.Random(batch)
    return [{"prompt_token_ids": [draw.randrange(vocab) for _ in range(INPUT_LEN)]} for _ in range(batch)]


def generate(llm: LLM, case: str, batch: int, tokens: int) -> list[list[int]]:
    """The tokens of all requests."""
    prompts = prompts_of(batch, llm.engine.core.loaded.model.config.vocab_size)
    outputs = llm.generate(prompts, params_of(case, batch, tokens), use_tqdm=False)
    found = [output.outputs[0].token_ids for output in outputs]
    assert all(len(ids) == tokens for ids in found)
    return found


def measured(llm: LLM, batch: int) -> list[dict[str, Any]]:
    """A row for each case."""
    times: dict[str, list[float]] = {case: [] for case in CASES}
    tokens: dict[str, list[list[int]]] = {}
    for case in CASES:
        generate(llm, case, batch, SHORT)
    for _ in range(REPEATS):
        for case in CASES:
            with llm.engine.core.clock.recording() as steps:
                tokens[case] = generate(llm, case, batch, OUTPUT_LEN)
            times[case] += [step.microseconds for step in steps]
    medians = {case: statistics.median(found) for case, found in times.items()}
    rows = []
    for case in CASES:
        plain = [at for at in range(batch) if at % EVERY >= len(CASES[case])]
        equal = sum(tokens[case][at] == tokens[PLAIN][at] for at in plain)
        rows.append(
            {
                "batch": batch,
                "case": case,
                "asking": batch - len(plain),
                "step_us": medians[case],
                "more_us": medians[case] - medians[PLAIN],
                "more": medians[case] / medians[PLAIN] - 1,
                "plain_requests_with_equal_tokens": equal / len(plain),
            }
        )
    return rows


def kernels_of(llm: LLM, case: str, batch: int) -> float:
    """Kernels and copies of one step, by the profiler."""
    counts = []
    for tokens in (SHORT, LONG):
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            generate(llm, case, batch, tokens)
            torch.cuda.synchronize()
        on_device = torch.autograd.DeviceType.CUDA
        counts.append(sum(event.device_type == on_device for event in profile.events()))
    return (counts[1] - counts[0]) / (LONG - SHORT)


def main(file: Path, model: str) -> None:
    """Measure, print and write."""
    began = time.perf_counter()
    with LLM(
        str(MODELS / model),
        load_format="dummy",
        max_model_len=INPUT_LEN + OUTPUT_LEN,
        max_running_requests=BATCHES[-1],
        cuda_graph_bs=BATCHES,
        cuda_graph_prefill_tokens=(512, 4096),
        enable_prefix_caching=False,
    ) as llm:
        print(f"{model}: started in {time.perf_counter() - began:.0f} s", flush=True)
        rows = []
        print("batch  case        asking  step us  more us   more  equal tokens of plain requests")
        for batch in BATCHES:
            for row in measured(llm, batch):
                rows.append(row)
                print(
                    f"{batch:5d}  {row['case']:10s}  {row['asking']:6d}  {row['step_us']:7.0f}  "
                    f"{row['more_us']:7.1f}  {row['more']:5.1%}  "
                    f"{row['plain_requests_with_equal_tokens']:.0%}",
                    flush=True,
                )
        report = llm.sampling_report()
        assert report is not None
        # Last: launches were seen to take longer once the profiler has been used.
        kernels = {case: kernels_of(llm, case, BATCHES[0]) for case in (PLAIN, ALL)}
        print(
            f"kernels a step at {BATCHES[0]}: {kernels[PLAIN]:.1f} plain, {kernels[ALL]:.1f} with all kinds"
        )
        described = {
            "benchmark": "mixed kinds",
            "machine": machine(),
            "model": model,
            "one_request_in": EVERY,
            "asked": KINDS,
            "limit": LIMIT,
            "is_within_limit": all(row["more"] <= LIMIT for row in rows),
            "num_sampling_graphs": len(report.graphs),
            "kernels_of_a_step": {"batch": BATCHES[0], **kernels},
            "seconds": round(time.perf_counter() - began, 1),
            "rows": rows,
        }
    file.parent.mkdir(parents=True, exist_ok=True)
    write_json(described, file)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", type=Path, help="where the result goes")
    parser.add_argument("--model", default="qwen3-0.6b", help="a folder of benchmarks/models")
    arguments = parser.parse_args()
    main(arguments.file, arguments.model)
