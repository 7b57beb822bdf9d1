"""What adapters cost a whole decode step, beside an engine that serves none.

python -m ostinato.bench.lora benchmarks/results/lora-h200.json [--model llama-3.1-8b] [--rank 16]

Engines with the same random weights, every second one with `enable_lora`, in turns: no adapter in the batch,
and four of them, one after the other over the requests. Prompts of 128 tokens; a step is timed on the host,
which is ahead of the device, from its beginning to that of the next; median over the steps of all repeats.
Where an engine's weights lie in memory changes its steps by up to 1%, from start to start: so there are three
of each kind (`--engines`), a case is the median of theirs, and every one is in the result, with the time that
its graph without adapters takes alone.
Then one more with 64 slots and as many adapters, all of them in one batch. Time to capture comes from
the starts, time to write a slot from the host to the device is taken with nothing else under way.
"""

import argparse
import itertools
import json
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from ostinato import LLM, LoRARequest, SamplingParams
from ostinato.models.adapters.reading import adaptable

from ..tools.machine import machine
from ..tools.replays import replay_us
from ..tools.results import write_json
from .repository import MODELS

ACTIVE, MANY = 4, 64
INPUT_LEN, OUTPUT_LEN, REPEATS, SHORT = 128, 96, 2, 8
PLAIN, NONE, FOUR = "no lora", "none in the batch", "4 adapters"
WANTED = {NONE: {1: 0.005, 32: 0.005, 128: 0.005}, FOUR: {1: 0.08, 32: 0.12, 128: 0.15}}
"""At most so much more than without, by case and batch."""


def write_adapter(llm: LLM, directory: Path, rank: int, seed: int) -> str:
    """A random adapter of all linear layers, as PEFT saves it."""
    model = llm.engine.core.loaded.model
    generator = torch.Generator(model.embed_tokens.weight.device).manual_seed(seed)
    options: dict[str, Any] = {"generator": generator, "device": generator.device, "dtype": torch.bfloat16}
    tensors, kinds = {}, set()
    for name, linear in adaptable(model).items():
        rows = linear.parts or (linear.weight.size(0),)
        for layer, num_rows in zip(model.config.family.tensors.of(name), rows, strict=True):
            inner = linear.weight.size(1)
            prefix = f"base_model.model.{layer}.lora_"
            tensors[f"{prefix}A.weight"] = (torch.randn(rank, inner, **options) * inner**-0.5).cpu()
            tensors[f"{prefix}B.weight"] = (torch.randn(num_rows, rank, **options) * 0.05).cpu()
            kinds.add(layer.rpartition(".")[2])
    directory.mkdir()
    save_file(tensors, directory / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": sorted(kinds)}
    (directory / "adapter_config.json").write_text(json.dumps(config))
    return str(directory)


def generate(
    llm: LLM, batch: int, tokens: int, adapters: Sequence[LoRARequest | None] = (None,)
) -> list[list[int]]:
    """The tokens of all requests."""
    draw, vocab = random.Random(batch), llm.engine.core.loaded.model.config.vocab_size
    prompts = [{"prompt_token_ids": [draw.randrange(vocab) for _ in range(INPUT_LEN)]} for _ in range(batch)]
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    asked = [adapters[number % len(adapters)] for number in range(batch)]
    outputs = llm.generate(prompts, params, lora_request=asked, use_tqdm=False)
    assert all(output.error is None for output in outputs)
    return [output.outputs[0].token_ids for output in outputs]


def measured(
    plain: Sequence[LLM], adapted: Sequence[LLM], adapters: Sequence[LoRARequest], batch: int
) -> list[dict[str, Any]]:
    """A row for each case."""
    cases: dict[str, tuple[Sequence[LLM], Sequence[LoRARequest | None]]] = {
        PLAIN: (plain, (None,)),
        NONE: (adapted, (None,)),
        FOUR: (adapted, adapters),
    }
    times: dict[str, list[list[float]]] = {case: [[] for _ in llms] for case, (llms, _) in cases.items()}
    tokens: dict[str, list[list[int]]] = {}
    for llms, asked in cases.values():
        for llm in llms:
            generate(llm, batch, SHORT, asked)
    turns = [*itertools.permutations(cases)]
    for repeat in range(REPEATS):
        for at in range(len(plain)):
            # In every order, so that nobody is always the one behind the same other.
            for case in turns[(repeat * len(plain) + at) % len(turns)]:
                llms, asked = cases[case]
                with llms[at].engine.core.clock.recording() as steps:
                    found = generate(llms[at], batch, OUTPUT_LEN, asked)
                assert tokens.setdefault(case, found) == found
                times[case][at] += [step.microseconds for step in steps]
    each = {case: [statistics.median(of_one) for of_one in found] for case, found in times.items()}
    medians = {case: statistics.median(found) for case, found in each.items()}
    rows = []
    for case in cases:
        more, limit = medians[case] / medians[PLAIN] - 1, WANTED.get(case, {}).get(batch)
        equal = sum(own == other for own, other in zip(tokens[case], tokens[PLAIN], strict=True))
        row: dict[str, Any] = {
            "batch": batch,
            "case": case,
            "step_us": medians[case],
            "more": more,
            "wanted": limit,
        }
        row |= {"is_within": limit is None or more <= limit, "equal_tokens": equal / batch}
        row["step_us_of_each_engine"] = each[case]
        if case != FOUR:
            runners = [llm.engine.core.runner for llm in cases[case][0]]
            row["graph_us_of_each_engine"] = [replay_us(of, of.graphs, batch) for of in runners]
        rows.append(row)
        print(
            f"{batch:5d}  {case:17s}  {medians[case]:8.1f}  {more:6.2%}  "
            f"{'' if limit is None else f'{limit:.1%}':>6s}  {equal / batch:12.0%}  "
            + " ".join(f"{us:.0f}" for us in each[case])
            + " / "
            + " ".join(f"{us:.0f}" for us in row.get("graph_us_of_each_engine", ())),
            flush=True,
        )
    return rows


def capture_seconds(llms: Sequence[LLM]) -> float:
    """Of all graphs of one engine."""
    return statistics.median(
        sum(seconds for name, seconds in llm.startup_times().items() if name.startswith("capture "))
        for llm in llms
    )


def synchronize() -> None:
    """Wait for the device."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def write_milliseconds(llm: LLM) -> float:
    """To bring one adapter from the host to its slot."""
    core = llm.engine.core
    assert core.adapters is not None
    assert core.runner.adapters is not None
    [version, *_] = [held for held in core.adapters.slots.tenants if held is not None]
    assert version.adapter is not None
    found = []
    for _ in range(5):
        synchronize()
        began = time.perf_counter()
        core.runner.adapters.write(0, version.adapter)
        synchronize()
        found.append(1e3 * (time.perf_counter() - began))
    core.adapters.slots.contents_are_gone()
    return statistics.median(found)


def many_resident(model: str, paths: Sequence[str], rank: int, options: dict[str, Any]) -> dict[str, Any]:
    """64 adapters in as many slots, all in one batch."""
    more: dict[str, Any] = {"enable_lora": True, "max_loras": MANY, "max_lora_rank": rank}
    with LLM(model, **options, **more) as llm:
        asked = [
            LoRARequest(f"adapter-{number}", number + 1, paths[number % len(paths)]) for number in range(MANY)
        ]
        generate(llm, MANY, SHORT, asked)
        with llm.engine.core.clock.recording() as steps:
            generate(llm, MANY, OUTPUT_LEN, asked)
        resident = sum(each.is_on_device for each in llm.engine.adapters.listed())
        many = statistics.median(step.microseconds for step in steps)
        with llm.engine.core.clock.recording() as steps:
            generate(llm, MANY, OUTPUT_LEN)
        found = {
            "slots": MANY,
            "resident": resident,
            "bytes": llm.memory_report()["adapters"],
            "step_us": many,
            "step_us_without": statistics.median(step.microseconds for step in steps),
        }
    print(f"{MANY} slots: {found}", flush=True)
    return found


def main(file: Path, name: str, rank: int, batches: Sequence[int], num_engines: int) -> None:
    """Measure, print and write."""
    began = time.perf_counter()
    model = str(MODELS / name) if (MODELS / name).is_dir() else name
    options: dict[str, Any] = {
        "load_format": "dummy",
        "max_model_len": INPUT_LEN + OUTPUT_LEN,
        "max_running_requests": max(*batches, MANY),
        "num_pages": 16 * max(*batches, MANY),
        "cuda_graph_bs": tuple(sorted({*batches, MANY})),
        "cuda_graph_prefill_tokens": (512, 4096),
        "enable_prefix_caching": False,
        "progress": False,
    }
    of_lora: dict[str, Any] = {"enable_lora": True, "max_loras": ACTIVE, "max_lora_rank": rank}
    with tempfile.TemporaryDirectory() as folder:
        with ExitStack() as open_engines:
            plain, adapted = [], []
            for _ in range(num_engines):
                plain.append(open_engines.enter_context(LLM(model, **options)))
                adapted.append(open_engines.enter_context(LLM(model, **options, **of_lora)))
            paths = [write_adapter(plain[0], Path(folder) / str(at), rank, at) for at in range(ACTIVE)]
            adapters = [LoRARequest(f"adapter-{at}", at + 1, path) for at, path in enumerate(paths)]
            titles = "batch  case               step us    more  wanted  equal tokens  each engine"
            print(f"{titles} / its graph alone", flush=True)
            rows = [row for batch in batches for row in measured(plain, adapted, adapters, batch)]
            seconds = {"without": capture_seconds(plain), "with": capture_seconds(adapted)}
            eager = dict(adapted[0].graph_report().eager_steps)
            milliseconds = write_milliseconds(adapted[0])
        many = many_resident(model, paths, rank, options)
    described = {
        "benchmark": "lora",
        "machine": machine(),
        "model": name,
        "rank": rank,
        "adapters": ACTIVE,
        "engines": num_engines,
        "is_within_wanted": all(row["is_within"] for row in rows),
        "capture_seconds": seconds,
        "capture_times": seconds["with"] / seconds["without"],
        "slot_write_ms": milliseconds,
        "eager_steps": eager,
        "many": many,
        "seconds": round(time.perf_counter() - began, 1),
        "rows": rows,
    }
    print(f"capture {seconds}, a slot in {milliseconds:.1f} ms, eager steps {eager}")
    file.parent.mkdir(parents=True, exist_ok=True)
    write_json(described, file)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", type=Path, help="where the result goes")
    parser.add_argument("--model", default="llama-3.1-8b", help="a folder of benchmarks/models, or any")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 32, 128])
    parser.add_argument("--engines", type=int, default=3, help="of each kind")
    arguments = parser.parse_args()
    main(arguments.file, arguments.model, arguments.rank, arguments.batches, arguments.engines)
