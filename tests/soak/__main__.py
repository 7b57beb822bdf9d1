"""Soaks a server, from tests/: `python -m soak FILE [--minutes 120] [--rate 6] [--clients 6]`.

A real server on the CPU with a small random model, two adapters and two keys gets requests of every kind from
several clients, while an operator lets it sleep, pauses it, and writes adapters and weights again. Every
answer is compared with that to the same question alone, asked before. Once a minute the clients stop until
nothing runs: then memory, descriptors and threads of every process are read. The file has the verdict, is
written after every minute, and its `passed` is the exit status.
"""

import argparse
import asyncio
import json
import os
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ostinato.tools.machine import machine
from server.server_process import ServerProcess

from .clients import Clients
from .processes import group, judged
from .questions import ADAPTERS, write_model

SETTLE_SECONDS = 1.5
"""After the last answer: idle connections are closed, and what was aborted is over."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m soak", description=__doc__.split("\n")[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("--minutes", type=float, default=120.0)
    parser.add_argument("--warm-up", type=float, default=10.0, help="minutes that do not count")
    parser.add_argument("--every", type=float, default=60.0, help="seconds between two looks at processes")
    parser.add_argument("--rate", type=float, default=6.0, help="requests a second")
    parser.add_argument("--clients", type=int, default=6)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        return 0 if soak(Path(place), options)["verdict"]["passed"] else 1


def soak(place: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Returns the result, which is in the file as well."""
    flags = write_model(place)
    adapters = {name: str(place / name) for name in ADAPTERS}
    with ServerProcess(None, *flags, bare=True) as server:
        clients = Clients(server, str(place / "model"), adapters, options.seed)
        asyncio.run(clients.learn())
        described = machine()
        root, samples, began = server.process.pid, [], time.monotonic()
        spent, own = _seconds(root), time.process_time()
        result: dict[str, Any] = {}
        while time.monotonic() - began < options.minutes * 60 and server.process.poll() is None:
            asyncio.run(clients.talk(options.every - SETTLE_SECONDS, options.rate, options.clients))
            asyncio.run(clients.wait_until_idle())
            time.sleep(SETTLE_SECONDS)
            passed = time.monotonic() - began
            members = [asdict(member) for member in group(root)]
            samples.append({"seconds": round(passed, 1), "members": members})
            result = {
                "benchmark": "soak",
                "machine": described,
                "options": {"minutes": options.minutes, "rate": options.rate, "clients": options.clients},
                "seconds": round(passed, 1),
                "share_of_a_core": {
                    "server": round((_seconds(root) - spent) / passed, 3),
                    "clients": round((time.process_time() - own) / passed, 3),
                },
                "verdict": _verdict(samples, options, clients, server),
                "asked": dict(sorted(clients.counts.items())),
                "wrong": clients.wrong,
                "samples": samples,
            }
            written = options.file.with_suffix(".new")
            written.write_text(json.dumps(result, indent=1) + "\n")
            os.replace(written, options.file)
            verdict = result["verdict"]
            print(f"{passed:.0f} s", json.dumps({**verdict, "processes": None}), flush=True)
    return result


def _verdict(samples: list[Any], options: Any, clients: Clients, server: ServerProcess) -> dict[str, Any]:
    verdict = judged(samples, options.warm_up * 60)
    verdict |= {"answers": clients.counts.total(), "wrong_answers": clients.num_wrong}
    if clients.num_wrong:
        verdict["why"].append(f"{clients.num_wrong} answers were not as expected")
    if "Traceback" in server.log:
        verdict["why"].append("the server's log has a traceback")
    if server.process.poll() is not None:
        verdict["why"].append(f"the server ended with exit code {server.process.returncode}")
    return {**verdict, "passed": not verdict["why"]}


def _seconds(root: int) -> float:
    return sum(member.seconds for member in group(root))


if __name__ == "__main__":
    sys.exit(main())
