"""The process of a peer: reads its settings and then workloads from standard input, one JSON line each.

Answers go to the original standard output; everything that the peer prints goes to standard error.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any, Protocol


class Peer(Protocol):
    """Another project's engine."""

    def generate(self, prompts: list[list[int]], output_lens: list[int]) -> list[list[int]]:
        """Greedy answers of exactly these lengths; returns when the last token is on the host."""


def main() -> None:
    """Serve until standard input ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def answer(message: dict[str, Any]) -> None:
        answers.write(json.dumps(message) + "\n")
        answers.flush()

    settings = json.loads(sys.stdin.readline())
    try:
        started = time.perf_counter()
        peer, version = start(settings)
        answer({"version": version, "start_s": time.perf_counter() - started})
        for line in sys.stdin:
            answer(serve(peer, json.loads(line)))
    except Exception as error:
        # The traceback goes to standard error; the benchmark shows its user this one line.
        answer({"error": f"{type(error).__name__}: {error}"})
        raise


def start(settings: dict[str, Any]) -> tuple[Peer, str]:
    """Load the requested peer; returns it and its version."""
    if settings["peer"] == "vllm":
        from .vllm_peer import start_vllm

        return start_vllm(settings)
    if settings["peer"] == "sglang":
        from .sglang_peer import start_sglang

        return start_sglang(settings)
    from .transformers_peer import start_transformers

    return start_transformers(settings)


def serve(peer: Peer, asked: dict[str, Any]) -> dict[str, Any]:
    """Serve one workload, timed."""
    prompts, output_lens = asked["prompts"], asked["output_lens"]
    started = time.perf_counter()
    if asked["one_by_one"]:
        tokens = [
            peer.generate([prompt], [length])[0] for prompt, length in zip(prompts, output_lens, strict=True)
        ]
    else:
        tokens = peer.generate(prompts, output_lens)
    return {"seconds": time.perf_counter() - started, "tokens": tokens}


if __name__ == "__main__":
    main()
