"""Runs the corpus, from tests/: `python -m corpus [--only WORD ...] [--device cpu] [--jobs N] [--out FILE]`.

Programs run in worker processes, one after the other in each; a program that kills its worker or takes too
long costs only itself.
"""

import argparse
import fnmatch
import json
import os
import platform
import queue
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parents[1]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m corpus", description="Runs ordinary programs")
    parser.add_argument("--only", nargs="*", default=[], help="names or parts of them, tags, files")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--limit", type=float, default=60.0, help="seconds per program")
    parser.add_argument("--stop-after", type=float, default=None, help="begin none after so many seconds")
    parser.add_argument("--no-diagnosis", action="store_true", help="without verify and doctor")
    parser.add_argument("--fresh", action="store_true", help="a process for every program")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work(options)
    else:
        run(options)


def work(options: argparse.Namespace) -> None:
    """Runs the programs whose names come in, and writes how they went."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what programs print
    import torch

    from corpus.registry import all_programs, run_program

    torch.set_num_threads(1)
    programs = all_programs()
    folders = (f"{TESTS.parent}/", f"{Path(torch.__file__).parents[1]}/")
    for line in sys.stdin:
        result = run_program(programs[line.strip()], options.device, not options.no_diagnosis)
        answer = json.dumps(result.as_dict())
        for folder in folders:  # where it was run is of no interest
            answer = answer.replace(folder, "")
        print(answer, file=answers, flush=True)
        if options.device != "cpu":
            torch.cuda.synchronize()  # an error of the device that would be the next program's


class Worker:
    """A process that runs programs."""

    def __init__(self, options: argparse.Namespace) -> None:
        command = [sys.executable, "-m", "corpus", "--worker", "--device", options.device]
        command += ["--no-diagnosis"] * options.no_diagnosis
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, cwd=TESTS, stdin=pipe, stdout=pipe, stderr=pipe, text=True)
        self.errors: list[str] = []
        threading.Thread(target=self._listen, daemon=True).start()
        self.warm = False

    def _listen(self) -> None:
        for line in self.process.stderr:
            self.errors = [*self.errors[-8:], line]

    def ask(self, name: str, limit: float) -> dict[str, Any] | str:
        """Returns the result of a program, or what became of the process."""
        timer = threading.Timer(limit + (0 if self.warm else 60), self.process.kill)
        timer.start()
        begun = time.monotonic()
        try:
            print(name, file=self.process.stdin, flush=True)
            line = self.process.stdout.readline()
        except BrokenPipeError:
            line = ""
        timer.cancel()
        self.warm = True
        if line:
            return json.loads(line)
        code = self.process.wait()
        if time.monotonic() - begun >= limit:
            return f"took more than {limit:.0f} seconds"
        return f"ended its process ({code}): {''.join(self.errors)[-1500:]}"

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.stdin.close()
            self.process.wait(30)


def run(options: argparse.Namespace) -> None:
    """Runs all programs that were chosen, prints a table and writes the file."""
    from corpus.registry import all_programs

    programs = {name: one for name, one in all_programs().items() if chosen(one, options.only)}
    names: queue.Queue[str] = queue.Queue()
    for name in programs:
        names.put(name)
    results: dict[str, dict[str, Any]] = {}
    begun = time.monotonic()

    def take_turns() -> None:
        worker = None
        while options.stop_after is None or time.monotonic() - begun < options.stop_after:
            try:
                name = names.get_nowait()
            except queue.Empty:
                break
            worker = worker or Worker(options)
            answer = worker.ask(name, options.limit)
            if isinstance(answer, str):
                answer = {"name": name, "tags": programs[name].tags, "outcome": "crashed", "error": answer}
                worker = None
            results[name] = answer
            show(answer)
            if options.fresh and worker is not None:
                worker = worker.end()
        if worker is not None:
            worker.end()

    threads = [threading.Thread(target=take_turns) for _ in range(options.jobs)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    ordered = [results[name] for name in programs if name in results]
    print(table(ordered))
    if overwritten := sum(one.get("overwritten_only", False) for one in ordered):
        print(f"{overwritten} are wrong only as a later call overwrites an earlier result")
    if len(ordered) < len(programs):
        print(f"{len(programs) - len(ordered)} programs were not run for lack of time")
    if options.out is not None:
        write(options, ordered, time.monotonic() - begun, len(programs) - len(ordered))


def chosen(one: Any, only: list[str]) -> bool:
    half = one.body.__module__.removeprefix("corpus.")
    return not only or any(
        w in one.name or w in one.tags or fnmatch.fnmatch(one.name, w) or half.startswith(w) for w in only
    )


def show(result: dict[str, Any]) -> None:
    """Prints a line for a program, more for one with complaints."""
    calls = f"{result.get('graph_calls', 0)} from graphs, {result.get('eager_calls', 0)} eager"
    print(f"{result['outcome']:18} {result['name']:44} {calls}, {result.get('seconds', 0)} s", flush=True)
    said = result.get("differences", [])[:3] + result.get("alarms", [])
    said += [result["error"]] if "error" in result else []
    said += result.get("reasons", [])[:2] if result["outcome"] not in ("right",) else []
    for one in said:
        print(f"    {one}")


def table(results: list[dict[str, Any]]) -> str:
    """Counts outcomes by tag."""
    from corpus.registry import OUTCOMES

    rows = {"all": results}
    for tag in sorted({tag for one in results for tag in one["tags"]}):
        rows[tag] = [one for one in results if tag in one["tags"]]
    head = ["programs", *OUTCOMES, "false alarms"]
    lines = [f"| {'':16} | " + " | ".join(head) + " |", f"|{'---|' * (len(head) + 1)}"]
    for tag, members in rows.items():
        outcomes = Counter(one["outcome"] for one in members)
        alarms = sum(bool(one.get("alarms")) for one in members)
        counts = [len(members), *(outcomes[o] for o in OUTCOMES), alarms]
        cells = (f"{count:>{len(name)}}" for count, name in zip(counts, head, strict=True))
        lines.append(f"| {tag:16} | {' | '.join(cells)} |")
    return "\n".join(lines)


def write(options: argparse.Namespace, results: list[dict[str, Any]], seconds: float, left: int) -> None:
    """Writes the result file."""
    import torch

    from corpus.registry import OUTCOMES

    cuda = options.device.startswith("cuda")
    words = sys.argv[1 : sys.argv.index("--out")] + sys.argv[sys.argv.index("--out") + 2 :]
    counts = Counter(one["outcome"] for one in results)
    whole = {
        "command": " ".join(["cd tests && python -m corpus", *words, "--out", options.out.name]),
        "machine": {
            "date": time.strftime("%Y-%m-%d"),
            "python": platform.python_version(),
            "torch": torch.__version__,
            "device": torch.cuda.get_device_name() if cuda else platform.processor() or platform.machine(),
        },
        "seconds": round(seconds, 1),
        "not_run": left,
        "outcomes": {outcome: counts[outcome] for outcome in OUTCOMES},
        "wrong_only_by_overwriting": sum(one.get("overwritten_only", False) for one in results),
        "false_alarms": sum(bool(one.get("alarms")) for one in results),
        "programs": results,
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(whole, indent=1) + "\n")


if __name__ == "__main__":
    main()
