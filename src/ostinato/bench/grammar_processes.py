"""What a step waits for grammars: followed in processes of their own, and in the process that asks.

python -m ostinato.bench.grammar_processes benchmarks/results/grammar-processes-cpu.json

A vocabulary of 128,256 made-up tokens; texts under one schema, or each under another. A step is: a token for
every text, then the masks of all. Needs no GPU and no model.
"""

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from ostinato.grammars.followed_text import FollowedText, Standing
from ostinato.grammars.host import GrammarHost
from ostinato.grammars.library import Library
from ostinato.grammars.limits import GrammarLimits
from ostinato.grammars.nursery import pack_vocabulary
from ostinato.text.grammar import mask_words
from ostinato.text.structured import StructuredOutputs

from ..tools.results import write_json

VOCAB, END, STEPS = 128_256, 3, 400
LETTER = ord("x")
BEGIN = list(b'{"text": "')


def vocabulary() -> list[bytes]:
    """The bytes, and words."""
    words = [f"{first}{at}".encode() for at in range(VOCAB) for first in (" w", "v")]
    return [b"" if byte == END else bytes([byte]) for byte in range(256)] + words[: VOCAB - 256]


def schema(number: int) -> str:
    """A text, and something that makes it another schema for each number."""
    return json.dumps(
        {
            "type": "object",
            "properties": {"text": {"type": "string"}, f"n{number}": {"type": "integer"}},
            "required": ["text", f"n{number}"],
        }
    )


def timed(step: Callable[[], None]) -> dict[str, float]:
    """Microseconds of a step."""
    times = []
    for _ in range(STEPS):
        began = time.perf_counter()
        step()
        times.append((time.perf_counter() - began) * 1e6)
    times.sort()
    return {"median_us": statistics.median(times), "p99_us": times[int(0.99 * STEPS)]}


def in_processes(host: GrammarHost, numbers: list[int]) -> dict[str, float]:
    """As the engine does it."""
    masks = np.zeros((len(numbers), mask_words(VOCAB)), dtype=np.int32)
    began = time.perf_counter()
    texts: list[FollowedText] = [host.text(StructuredOutputs(json=schema(number))) for number in numbers]
    for text in texts:
        text.begin()
    while any(text.standing is Standing.COMPILING for text in texts):
        host.attend(0.01)
    compiled = time.perf_counter() - began
    for text in texts:
        text.catch_up(BEGIN)

    def step() -> None:
        for text in texts:
            text.accept(LETTER)
        host.settle(texts)
        for at, text in enumerate(texts):
            text.fill(masks[at])

    host.settle(texts)
    found = timed(step)
    for text in texts:
        text.close()
    return {"compile_ms": compiled * 1e3, **found}


def in_this_process(library: Library, numbers: list[int]) -> dict[str, float]:
    """One after the other."""
    masks = np.zeros((len(numbers), mask_words(VOCAB)), dtype=np.int32)
    began = time.perf_counter()
    compiled = {number: library.compiled("json", schema(number)) for number in set(numbers)}
    taken = time.perf_counter() - began
    matchers = [library.matcher(compiled[number]) for number in numbers]
    for matcher in matchers:
        for token in BEGIN:
            assert matcher.accept_token(token)

    def step() -> None:
        for at, matcher in enumerate(matchers):
            matcher.accept_token(LETTER)
            matcher.is_terminated()
            matcher.fill_next_token_bitmask(masks[at : at + 1], 0)

    return {"compile_ms": taken * 1e3, **timed(step)}


def elsewhere(work: Callable[[], Any]) -> Any:
    """The result of a function in a forked process: the library stands in for torch where it is loaded."""
    reading, writing = os.pipe()
    if os.fork() == 0:
        os.write(writing, json.dumps(work()).encode())
        os._exit(0)
    os.close(writing)
    with open(reading) as file:
        found = json.load(file)
    os.wait()
    return found


def main(file: Path) -> None:
    """Measure, print and write."""
    tokens = vocabulary()
    cases = [("one schema", [0] * batch) for batch in (1, 8, 32)]
    cases += [("a schema each", list(range(batch))) for batch in (8, 32)]

    def work() -> list[dict[str, float]]:
        library = Library(tokens, VOCAB, [END])
        library.warm_up()
        return [in_this_process(library, numbers) for _, numbers in cases]

    inside = elsewhere(work)
    host = GrammarHost(lambda: pack_vocabulary(tokens, VOCAB, [END]), VOCAB, GrammarLimits())
    in_processes(host, [999])
    rows = []
    for (name, numbers), here in zip(cases, inside, strict=True):
        there = in_processes(host, numbers)
        rows.append({"texts": len(numbers), "grammars": name, "in_processes": there, "in_this_process": here})
        print(f"{len(numbers):3d} texts, {name:14s} {there}  in this process {here}", flush=True)
    host.close()

    from ..tools.machine import machine

    described = {"benchmark": "grammars in processes", "machine": machine(), "vocab": VOCAB, "rows": rows}
    file.parent.mkdir(parents=True, exist_ok=True)
    write_json(described, file)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", type=Path)
    main(parser.parse_args().file)
