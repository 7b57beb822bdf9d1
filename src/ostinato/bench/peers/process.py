"""A peer's process, seen from the benchmark: one JSON line per workload, one per answer."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from ...tools.results import BenchError
from ..contest import Contestant, Run, Starter, checked
from ..subject import Subject
from ..workload import Workload

PEERS = ("transformers", "vllm", "sglang")
"""Values of `--peer`."""


class PeerProcess:
    """A running peer. Its own clock measures it, without the pipe between us."""

    def __init__(self, name: str, settings: dict[str, Any]) -> None:
        self.name = name
        command = [sys.executable, "-m", "ostinato.bench.peers.worker"]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.described = self._ask({"peer": name, **settings})

    def serves(self, workload: Workload) -> bool:
        """Always."""
        return True

    def run(self, workload: Workload, *, one_by_one: bool = False) -> Run:
        """Serve the workload, as one batch or one request after the other."""
        asked = {"prompts": workload.prompts, "output_lens": workload.output_lens, "one_by_one": one_by_one}
        answer = self._ask(asked)
        return checked(Run(answer["seconds"], answer["tokens"]), workload, self.name)

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _ask(self, message: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps(message) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._died() from None
        line = self._process.stdout.readline()
        if not line:
            raise self._died()
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise BenchError(f"{self.name} failed: {answer['error']}")
        return answer

    def _died(self) -> BenchError:
        code = self._process.wait()
        return BenchError(f"the process of {self.name} ended with code {code}: see its output above")


class OneByOne:
    """The same peer, one request at a time."""

    def __init__(self, peer: PeerProcess) -> None:
        self.name = f"{peer.name}, one by one"
        self._peer = peer

    def serves(self, workload: Workload) -> bool:
        """Only workloads for which it makes a difference."""
        return len(workload) > 1

    def run(self, workload: Workload) -> Run:
        """Serve the requests one after the other."""
        return self._peer.run(workload, one_by_one=True)


def peer(name: str, subject: Subject, workloads: Sequence[Workload], versions: dict[str, Any]) -> Starter:
    """A peer, large enough for these workloads; once it runs, its version is written into `versions`."""
    if name not in PEERS:
        raise BenchError(f"unknown peer {name!r}: use {', '.join(PEERS)}")
    if importlib.util.find_spec(name) is None:
        raise BenchError(f"{name} is not installed here: install it beside ostinato, or leave out --peer")
    settings = {
        "directory": str(subject.directory),
        "random_weights": subject.has_random_weights,
        "dtype": subject.dtype_name,
        "device": subject.config.device.type,
        "threads": torch.get_num_threads(),
        "max_batch": max(map(len, workloads)),
        "max_len": max(workload.longest for workload in workloads) + 1,
    }

    @contextmanager
    def start() -> Iterator[Sequence[Contestant]]:
        process = PeerProcess(name, settings)
        versions[name] = process.described
        try:
            # One by one is the baseline on a CPU, where a batch gains little.
            in_turn = [OneByOne(process)] if name == "transformers" and not subject.on_gpu else []
            yield [process, *in_turn]
        finally:
            process.close()

    return start
