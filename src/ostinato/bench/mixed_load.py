"""Long prompts among running streams, through a server: latencies at several rates of arrivals.

python -m ostinato.bench.mixed_load FILE [--model qwen3-0.6b] [--rates 8 16 32] [--label now]
python -m ostinato.bench.mixed_load FILE --label "chunks of 2,048" --options '{"chunked_prefill_size": 2048}'
python -m ostinato.bench.mixed_load FILE --model llama-3.1-8b --rates 1 2 4 --targets none 50 25

A server with random weights, and `ostinato bench serving` on it: arrivals are Poisson's, lengths are drawn
like those of conversations, and every fifth prompt or so is long. A row is added to the file for each rate,
so that states of the code or options can be compared; what was measured stays if a later rate fails.
`--targets`: one server after the other with each `target_itl_ms`, `--rounds` times in turns.
"""

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ..tools.machine import machine
from ..tools.results import write_json
from .http_load import running_server
from .made_up_tokenizer import with_text
from .repository import MODELS
from .serving import ServingLoad, send_load
from .subject import Subject

LONG_SHARE, LONG_LEN, MOST_DRAWN = 0.2, 8192, 512
LONGEST = 16_384
FIGURES = ("finished", "failed", "output_tokens_per_second", "ttft_ms", "tpot_ms", "itl_ms", "long", "others")


def load_at(rate: float, seconds: float, vocab: int, url: str, shorter: int = 1) -> ServingLoad:
    """So many requests a second, always the same draw; `shorter`: lengths are divided by it."""
    return ServingLoad(
        base_url=url,
        num_requests=max(1, round(rate * seconds)),
        request_rate=rate,
        max_len=MOST_DRAWN // shorter,
        long_share=LONG_SHARE,
        long_len=LONG_LEN // shorter,
        token_ids=vocab,
    )


def add_row(file: Path, row: dict[str, Any]) -> None:
    """To what the file has."""
    result: dict[str, Any] = {"benchmark": "mixed load"}
    if file.exists():
        result = json.loads(file.read_text())
    result["machine"] = machine()
    result.setdefault("rows", []).append(row)
    write_json(result, file)


def measure(
    file: Path,
    model: str,
    rates: list[float],
    seconds: float,
    shorter: int,
    options: dict[str, Any],
    label: str,
) -> None:
    """Start a server, send the loads, print and add rows."""
    started = {"max_model_len": LONGEST // shorter, "enable_prefix_caching": False, **options}
    folder = MODELS / model
    subject = Subject.of({"model": str(folder) if folder.exists() else model, **started})
    vocab = subject.shape.vocab_size
    with with_text(subject) as (speaking, _), running_server(speaking.options) as url:
        send_load(load_at(rates[0], seconds / 4, vocab, url, shorter))
        for rate in rates:
            load = load_at(rate, seconds, vocab, url, shorter)
            found = send_load(load)
            row = {"label": label, "model": model, "options": options, "load": asdict(load)}
            add_row(file, row | {key: found[key] for key in FIGURES})
            print(f"{label}, {model}, {rate:g}/s: {found['finished']} finished, {shown(found)}", flush=True)


def shown(found: dict[str, Any]) -> dict[str, float]:
    """What is printed of a row."""
    figures = {"itl_ms p99": found["itl_ms"]["p99"], "itl_ms max": found["itl_ms"]["max"]}
    for kind in ("others", "long"):
        for key in ("ttft_ms", "tpot_ms"):
            if found[kind][key] is not None:
                figures[f"{kind} {key} p99"] = found[kind][key]["p99"]
    return {name: round(value, 1) for name, value in figures.items()}


def settings_of(targets: list[str], options: dict[str, Any], label: str) -> list[tuple[str, dict[str, Any]]]:
    """Label and options of each server."""
    if not targets:
        return [(label, options)]
    return [
        (
            f"{label}, target_itl_ms {each}",
            options if each == "none" else {**options, "target_itl_ms": float(each)},
        )
        for each in targets
    ]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", type=Path)
    parser.add_argument("--model", default="qwen3-0.6b")
    parser.add_argument("--rates", type=float, nargs="+", default=[8.0, 16.0, 32.0])
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("--label", default="now")
    parser.add_argument("--options", type=json.loads, default={})
    parser.add_argument("--targets", nargs="+", default=[], help="target_itl_ms of each server, or none")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--shorter", type=int, default=1, help="divides all lengths, for a slow machine")
    given = parser.parse_args()
    for _ in range(given.rounds):
        for name, chosen in settings_of(given.targets, given.options, given.label):
            measure(given.file, given.model, given.rates, given.seconds, given.shorter, chosen, name)
