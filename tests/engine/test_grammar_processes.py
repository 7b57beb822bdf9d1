"""Grammars that die, hang or take their time beside a request that has nothing to do with them."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from grammars.hostile import NEVER_MASKS, never_compiles
from grammars.processes import grammar_processes, is_alive, nurseries
from ostinato.engine.llm import LLM
from ostinato.engine.outputs import RequestOutput
from ostinato.engine.parameters.sampling_params import RequestError, SamplingParams
from ostinato.engine.text_engine import TextEngine
from ostinato.text.structured import StructuredOutputs

from .conftest import TinyModel

FREE = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)
NEVER_COMPILES = StructuredOutputs(json=never_compiles(2))


def digits(count: int, **more: Any) -> SamplingParams:
    wanted = StructuredOutputs(regex=f"[0-9]{{{count}}}")
    return SamplingParams(temperature=1.0, seed=3, max_tokens=100, structured_outputs=wanted, **more)


@pytest.fixture(scope="module")
def llm(tiny_text: TinyModel) -> Iterator[LLM]:
    options: dict[str, Any] = {"max_model_len": 128, "max_running_requests": 6, "num_pages": 80}
    with LLM(
        tiny_text.directory, grammar_compile_seconds=1.0, grammar_mask_seconds=0.5, steps_ahead=1, **options
    ) as llm:
        yield llm


class Watch:
    """Steps an engine and notes the longest time in which a victim got no token; it asks again and again."""

    def __init__(self, llm: LLM) -> None:
        self.engine: TextEngine = llm.engine
        self.victim = self.engine.add("hello", FREE)
        self.longest_gap = 0.0
        while not self.victim.outputs[0].token_ids:
            self.engine.step()
        self._last = time.monotonic()

    def step(self) -> None:
        before = len(self.victim.outputs[0].token_ids)
        self.engine.step()
        if len(self.victim.outputs[0].token_ids) > before:
            now = time.monotonic()
            self.longest_gap, self._last = max(self.longest_gap, now - self._last), now
        if self.victim.finished:
            assert self.victim.error is None
            self.victim = self.engine.add("hello", FREE)

    def until(self, output: RequestOutput, tokens: int | None = None) -> None:
        """`output` has so many tokens, or has ended."""
        end = time.monotonic() + 30
        while not output.finished and (tokens is None or len(output.outputs[0].token_ids) < tokens):
            assert time.monotonic() < end
            self.step()

    def close(self) -> None:
        self.engine.abort(self.victim.request_id)
        self.engine.core.scheduler.check_integrity()
        assert self.longest_gap < 1.0


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_text_goes_on_where_its_process_was_killed_or_stopped(llm: LLM, how: signal.Signals) -> None:
    [expected] = llm.generate("hello", digits(60))
    watch = Watch(llm)
    output = watch.engine.add("hello", digits(60))
    watch.until(output, 20)
    for pid in grammar_processes():
        os.kill(pid, how)
    watch.until(output)
    watch.close()
    assert output.error is None
    assert output.outputs[0].token_ids == expected.outputs[0].token_ids
    assert re.fullmatch("[0-9]{60}", output.outputs[0].text)


def test_a_grammar_that_never_compiles_is_refused_and_nobody_waits(llm: LLM) -> None:
    watch = Watch(llm)
    bad = watch.engine.add("hello", SamplingParams(structured_outputs=NEVER_COMPILES))
    good = watch.engine.add("hello", digits(5))
    watch.until(good)
    assert not bad.finished, "who came later has ended first"
    watch.until(bad)
    watch.close()
    assert "takes longer than 1 s to compile" in (bad.error or "")
    assert good.error is None
    with pytest.raises(RequestError, match="to compile"):
        llm.generate("hello", SamplingParams(structured_outputs=NEVER_COMPILES))


def test_a_grammar_whose_masks_never_come_ends_its_request_alone(llm: LLM) -> None:
    watch = Watch(llm)
    biased = {ord("1") - ord("!"): 100.0}  # the token: digits go on coming
    bad = watch.engine.add(
        "hello",
        SamplingParams(
            structured_outputs=StructuredOutputs(grammar=NEVER_MASKS), logit_bias=biased, max_tokens=90
        ),
    )
    good = watch.engine.add("hello", digits(90))
    watch.until(bad)
    watch.until(good)
    watch.close()
    assert "to say what may come next" in (bad.error or "")
    assert re.fullmatch("[0-9]{90}", good.outputs[0].text)


def test_an_abort_gives_up_a_grammar_that_is_being_compiled(llm: LLM) -> None:
    while llm.engine.has_work:
        llm.engine.step()
    before = set(grammar_processes())
    wanted = StructuredOutputs(json=never_compiles(3))
    output = llm.engine.add("hello", SamplingParams(structured_outputs=wanted))
    end = time.monotonic() + 10
    while not (new := set(grammar_processes()) - before):
        assert time.monotonic() < end
        llm.engine.step()
    llm.engine.abort(output.request_id)
    assert not llm.engine.has_work
    while any(map(is_alive, new)):
        assert time.monotonic() < end
        time.sleep(0.01)


def test_more_grammars_than_processes_take_turns(tiny_text: TinyModel) -> None:
    options: dict[str, Any] = {"max_model_len": 96, "max_running_requests": 4, "num_pages": 60}
    with LLM(tiny_text.directory, grammar_processes=2, **options) as llm:
        outputs = llm.generate(["hello"] * 9, [digits(count) for count in range(5, 14)])
        assert [len(output.outputs[0].text) for output in outputs] == list(range(5, 14))
        [nursery] = [pid for pid in nurseries() if pid not in OTHERS]
        processes = grammar_processes()
    assert not any(map(is_alive, [nursery]))
    assert len(processes) < 40


OTHERS: list[int] = []


@pytest.fixture(autouse=True)
def _others(llm: LLM) -> None:
    OTHERS[:] = nurseries()


SCRIPT = """
import os, sys, time
from ostinato import LLM, SamplingParams, StructuredOutputs
llm = LLM(sys.argv[1], max_model_len=96, max_running_requests=4, num_pages=60)
params = SamplingParams(max_tokens=20, structured_outputs=StructuredOutputs(regex="[0-9]{5}"))
print(llm.generate("hello", params)[0].outputs[0].text, flush=True)
for pid in filter(str.isdigit, os.listdir("/proc")):
    try:
        if os.readlink(f"/proc/{pid}/cwd") == os.getcwd():
            print(pid, flush=True)
    except OSError:
        pass
if sys.argv[2] == "killed":
    os.kill(os.getpid(), 9)
"""


@pytest.mark.parametrize("end", ["killed", pytest.param("at its end", marks=pytest.mark.slow)])
def test_a_script_without_a_guard_leaves_nothing_behind(
    tiny_text: TinyModel, tmp_path: Path, end: str
) -> None:
    """Nor does a file beside it that has the name of a module hurt."""
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "numpy.py").write_text("raise RuntimeError")
    before = set(os.listdir("/dev/shm"))
    environment = {**os.environ, "PYTHONSAFEPATH": "1", "TMPDIR": str(tmp_path)}
    command = [sys.executable, "script.py", tiny_text.directory, end]
    ran = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    text, *pids = ran.stdout.splitlines() or [""]
    assert re.fullmatch("[0-9]{5}", text), ran.stderr
    assert len(pids) >= 3, "the script, a nursery, a grammar"
    assert ran.returncode == (-9 if end == "killed" else 0)
    deadline = time.monotonic() + 5
    while any(_is_ours(pid, tmp_path) for pid in os.listdir("/proc")):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    while left := {name for name in os.listdir("/dev/shm") if not _is_of_another(name, pids)} - before:
        assert time.monotonic() < deadline, left
        time.sleep(0.02)
    assert {path.name for path in tmp_path.iterdir()} <= {"script.py", "numpy.py"}


def _is_of_another(name: str, pids: list[str]) -> bool:
    """Whether this shared memory of torch was made by a test beside this one, which may leave some behind."""
    made_by = re.match("torch_([0-9]+)_", name)
    return made_by is not None and made_by[1] not in pids


def _is_ours(pid: str, folder: Path) -> bool:
    try:
        is_here = Path(f"/proc/{pid}/cwd").readlink() == folder
    except OSError:
        return False
    return is_here and is_alive(int(pid))
