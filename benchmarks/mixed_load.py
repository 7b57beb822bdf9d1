"""Long prompts among running streams, through a server: latencies at several rates of arrivals.

python benchmarks/mixed_load.py FILE [--model qwen3-0.6b] [--rates 8 16 32] [--label now]
python benchmarks/mixed_load.py FILE --label "chunks of 2,048" --options '{"chunked_prefill_size": 2048}'

A server with random weights, and `ostinato bench serving` on it: arrivals are Poisson's, lengths are drawn
like those of conversations, and every fifth prompt or so is long. A row is added to the file for each rate,
so that states of the code or options can be compared; what was measured stays if a later rate fails.
"""

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ostinato.tools.bench.made_up_tokenizer import with_text
from ostinato.tools.bench.subject import Subject
from ostinato.tools.bench_http import running_server
from ostinato.tools.bench_serving import ServingLoad, send_load
from ostinato.tools.machine import machine

MODELS = Path(__file__).parent / "models"
LONG_SHARE, LONG_LEN, MOST_DRAWN = 0.2, 8192, 512
FIGURES = ("finished", "failed", "output_tokens_per_second", "ttft_ms", "tpot_ms", "itl_ms", "long", "others")


def load_at(rate: float, seconds: float, vocab: int, url: str) -> ServingLoad:
    """So many requests a second, always the same draw."""
    return ServingLoad(
        base_url=url,
        num_requests=max(1, round(rate * seconds)),
        request_rate=rate,
        max_len=MOST_DRAWN,
        long_share=LONG_SHARE,
        long_len=LONG_LEN,
        token_ids=vocab,
    )


def add_row(file: Path, row: dict[str, Any]) -> None:
    """To what the file has."""
    result: dict[str, Any] = {"benchmark": "mixed load"}
    if file.exists():
        result = json.loads(file.read_text())
    result["machine"] = machine()
    result.setdefault("rows", []).append(row)
    file.write_text(json.dumps(result, indent=2) + "\n")


def main(
    file: Path, model: str, rates: list[float], seconds: float, label: str, options: dict[str, Any]
) -> None:
    """Start the server, send the loads, print and add rows."""
    started = {"max_model_len": 16_384, "enable_prefix_caching": False, **options}
    subject = Subject.of({"model": str(MODELS / model), **started})
    vocab = subject.shape.vocab_size
    with with_text(subject) as (speaking, _), running_server(speaking.options) as url:
        send_load(load_at(rates[0], seconds / 4, vocab, url))
        for rate in rates:
            load = load_at(rate, seconds, vocab, url)
            found = send_load(load)
            row = {"label": label, "model": model, "options": options, "load": asdict(load)}
            add_row(file, row | {key: found[key] for key in FIGURES})
            shown = {
                f"{kind} {key} p99": round(found[kind][key]["p99"], 1)
                for kind in ("others", "long")
                for key in ("ttft_ms", "tpot_ms")
                if found[kind][key] is not None
            }
            print(f"{label}, {model}, {rate:g}/s: {found['finished']} finished, {shown}", flush=True)


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
    given = parser.parse_args()
    main(given.file, given.model, given.rates, given.seconds, given.label, given.options)
