"""Processes of grammars die, hang, are stopped and killed: texts go on, and who is at fault is told."""

import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

import pytest

from ostinato.grammars.followed_text import Standing
from ostinato.grammars.host import GrammarHost
from ostinato.grammars.limits import MAX_SPECIFICATION_BYTES
from ostinato.text.errors import GrammarError
from ostinato.text.structured import StructuredOutputs

from .hostile import CRASHING, NEVER_MASKS, never_compiles
from .hosts import END, Writer, make_host
from .processes import grammar_processes, is_alive, is_busy, nurseries, resident_bytes
from .random_grammars import random_grammar

DIGITS = StructuredOutputs(regex="[0-9]{40}")
NEVER_COMPILES = StructuredOutputs(json=never_compiles(0))


@pytest.fixture(scope="module")
def host() -> Iterator[GrammarHost]:
    others = {*nurseries()}
    host = make_host(compile_seconds=1.5, mask_seconds=0.5)
    yield host
    host.close()
    assert {*nurseries()} <= others


def wait_for(condition: object, seconds: float = 5) -> None:
    end = time.monotonic() + seconds
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < end
        time.sleep(0.01)


def test_no_grammar_no_process_and_nothing_is_left() -> None:
    others = {*nurseries(), *grammar_processes()}
    idle = make_host()
    assert {*nurseries()} <= others
    idle.close()
    host = make_host()
    writer = Writer(host, DIGITS)
    assert writer.write(100) is Standing.COMPLETE
    assert re.fullmatch(b"[0-9]{40}", writer.written())
    [nursery], [process] = ({*found()} - others for found in (nurseries, grammar_processes))
    modules = Path(f"/proc/{nursery}/maps").read_text()
    assert "libtorch" not in modules
    descriptors = len(os.listdir("/proc/self/fd"))
    host.close()
    wait_for(lambda: not is_alive(nursery) and not is_alive(process))
    assert len(os.listdir("/proc/self/fd")) < descriptors


def test_texts_under_one_grammar_share_its_process(host: GrammarHost) -> None:
    before = len(grammar_processes())
    writers = [Writer(host, StructuredOutputs(regex="[a-f]{8}"), seed=at) for at in range(5)]
    for writer in writers:
        writer.settle()
    assert len(grammar_processes()) == before + 1
    for length in range(8):
        for writer in writers:
            writer.write(length)
    assert {writer.write(20) for writer in writers} == {Standing.COMPLETE}
    assert len({writer.written() for writer in writers}) == 5
    for writer in writers:
        writer.text.close()


def test_a_token_outside_the_grammar_and_a_dead_end_are_told(host: GrammarHost) -> None:
    writer = Writer(host, DIGITS)
    writer.settle()
    writer.put(ord("x"))
    assert writer.settle() is Standing.REFUSED
    writer.text.close()
    nowhere = Writer(host, StructuredOutputs(grammar="root ::= root"))
    assert nowhere.settle() is Standing.DEAD_END
    nowhere.text.close()


@pytest.mark.parametrize("victim", ["grammar", "nursery", "all"])
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_texts_outlive_their_processes(host: GrammarHost, victim: str, how: signal.Signals) -> None:
    """With the tokens that they would have had."""
    wanted = {}
    for name, regex in {"a": "[0-9]{40}", "b": "([a-f][0-9]){20}"}.items():
        undisturbed = Writer(host, StructuredOutputs(regex=regex), seed=7)
        assert undisturbed.write(100) is Standing.COMPLETE
        wanted[name] = undisturbed.tokens
        undisturbed.text.close()
    writers = {
        "a": Writer(host, StructuredOutputs(regex="[0-9]{40}"), seed=7),
        "b": Writer(host, StructuredOutputs(regex="([a-f][0-9]){20}"), seed=7),
    }
    for writer in writers.values():
        writer.write(11)
    killed = {
        "grammar": grammar_processes(),
        "nursery": nurseries(),
        "all": nurseries() + grammar_processes(),
    }
    for pid in killed[victim]:
        os.kill(pid, how)
    for name, writer in writers.items():
        assert writer.write(100) is Standing.COMPLETE, writer.text.error
        assert writer.tokens == wanted[name]
        writer.text.close()
    if how is signal.SIGSTOP:
        for pid in killed[victim]:
            if is_alive(pid):
                os.kill(pid, signal.SIGCONT)


def test_what_does_not_compile_in_time_is_refused_and_remembered(host: GrammarHost) -> None:
    began = time.monotonic()
    writer, other = Writer(host, NEVER_COMPILES), Writer(host, DIGITS)
    other.write(3)
    assert time.monotonic() - began < 1.4, "others do not wait for it"
    assert writer.settle() is Standing.FAILED
    assert "longer than 1.5 s to compile" in (writer.text.error or "")
    assert time.monotonic() - began < 5
    writer.text.close()
    other.text.close()
    with pytest.raises(GrammarError, match="to compile"):
        host.text(NEVER_COMPILES)
    wait_for(lambda: not any(map(is_busy, grammar_processes())))


def test_a_tenant_with_many_slow_grammars_delays_no_other() -> None:
    host = make_host(compile_seconds=6, compiling=2)
    slow = [Writer(host, StructuredOutputs(json=never_compiles(at)), tenant="bad") for at in range(8)]
    wait_for(lambda: host.attend(0.01) or len(list(filter(is_busy, grammar_processes()))) >= 2)
    began = time.monotonic()
    shared = Writer(host, NEVER_COMPILES, tenant="good")
    shared.text.close()
    for at in range(3):
        other = Writer(host, StructuredOutputs(regex=f"[0-9]{{{at + 3}}}"), tenant="good")
        other.write(3)
        other.text.close()
    assert time.monotonic() - began < 3, "as if there were free places"
    for each in slow:
        each.text.close()
    host.close()


def test_a_text_whose_masks_never_come_fails_and_the_others_go_on(host: GrammarHost) -> None:
    bad, good = Writer(host, StructuredOutputs(grammar=NEVER_MASKS)), Writer(host, DIGITS)
    good.settle()
    bad.settle()
    longest, began = 0.0, time.monotonic()
    while bad.text.standing is not Standing.FAILED:
        assert time.monotonic() - began < 25
        if bad.text.standing is Standing.FOLLOWS:
            bad.put(ord("1"))
        elif bad.text.standing is Standing.READY:
            bad.text.catch_up(bad.tokens)
        else:
            host.attend()
        asked = time.monotonic()
        if good.text.standing is Standing.FOLLOWS and len(good.tokens) < 39:
            good.put(ord("7"))
        longest = max(longest, time.monotonic() - asked)
        time.sleep(0.005)
    assert "to say what may come next" in (bad.text.error or "")
    assert longest < 0.5
    assert good.write(100) is Standing.COMPLETE
    bad.text.close()
    good.text.close()


def test_a_grammar_takes_no_more_memory_than_it_may() -> None:
    host = make_host(compile_seconds=20, memory_mb=16)
    properties = {f"p{number}": {"type": "string", "maxLength": 50} for number in range(1500)}
    writer = Writer(host, StructuredOutputs(json={"type": "object", "properties": properties}))
    assert writer.settle(30) is Standing.FAILED
    assert "takes more memory" in (writer.text.error or "")
    assert Writer(host, DIGITS).write(50) is Standing.COMPLETE
    host.close()


def test_what_is_given_up_while_it_compiles_takes_no_time_any_more(host: GrammarHost) -> None:
    writer = Writer(host, StructuredOutputs(json=never_compiles(1)))
    host.attend(0.2)
    writer.text.close()
    writer.text.close()
    wait_for(lambda: not any(map(is_busy, grammar_processes())))


@pytest.mark.parametrize("where", ["sent", "received"])
def test_what_an_interrupt_loses_is_noticed(host: GrammarHost, where: str) -> None:
    """No verdict is taken for that of another text."""
    wanted = StructuredOutputs(regex="([a-f][0-9]){6}")
    writers = [Writer(host, wanted, seed=at) for at in range(3)]
    for at, writer in enumerate(writers):
        writer.write(at + 1)
    process = writers[0].text.entry.process
    assert process is not None
    function = {"sent": "_seal", "received": "_take_verdicts"}[where]
    with patch.object(process, function, side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
        writers[1].put(writers[1].allowed()[0])
    if where == "sent":
        process._words.clear()
    for writer in writers:
        assert writer.write(50) is Standing.COMPLETE
        assert re.fullmatch(b"([a-f][0-9]){6}", writer.written())
        writer.text.close()


def test_without_descriptors_there_is_an_error_and_no_crash(host: GrammarHost) -> None:
    wanted = StructuredOutputs(regex="[a-c]{3}")
    error = OSError(24, "Too many open files")
    with patch("ostinato.grammars.process.os.memfd_create", side_effect=error):
        other = make_host()
        writer = Writer(other, wanted)
        end = time.monotonic() + 20
        while writer.text.standing is Standing.COMPILING:
            assert time.monotonic() < end
            other.attend(0.01)
        assert writer.text.standing is Standing.FAILED
        other.close()
    writer = Writer(host, wanted)
    assert writer.write(9) is Standing.COMPLETE
    writer.text.close()


def test_sizes_are_limited() -> None:
    host, before = make_host(), nurseries()
    with pytest.raises(GrammarError, match="characters"):
        host.text(StructuredOutputs(regex="a" * MAX_SPECIFICATION_BYTES))
    with pytest.raises(GrammarError, match="surrogate"):
        host.text(StructuredOutputs(regex="\udcff"))
    assert nurseries() == before


def distinct_schemas(host: GrammarHost, count: int) -> None:
    def serve(numbers: range) -> None:
        for number in numbers:
            schema = {"type": "object", "properties": {f"p{number}": {"enum": [f"v{number}"]}}}
            writer = Writer(host, StructuredOutputs(json=schema))
            writer.settle()
            writer.text.close()

    serve(range(40))
    before = resident_bytes(os.getpid())
    serve(range(40, count))
    assert resident_bytes(os.getpid()) - before < 0.1 * before
    wait_for(lambda: len(grammar_processes()) <= 32)
    assert sum(map(resident_bytes, nurseries())) < 200 * 2**20


def test_many_schemas_take_no_more_memory_than_few(host: GrammarHost) -> None:
    distinct_schemas(host, 100)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_thousand_schemas(host: GrammarHost) -> None:
    distinct_schemas(host, 1000)


@pytest.mark.parametrize("grammar", CRASHING)
def test_what_crashes_the_library_is_refused_and_remembered(host: GrammarHost, grammar: str) -> None:
    wanted = StructuredOutputs(grammar=grammar)
    writer, victim = Writer(host, wanted), Writer(host, DIGITS)
    assert writer.write(5) is Standing.FAILED
    assert writer.text.error == "this cannot be followed: the grammar ended the process that compiles it"
    assert victim.write(50) is Standing.COMPLETE
    writer.text.close()
    victim.text.close()
    with pytest.raises(GrammarError, match="ended the process"):
        host.text(wanted)


@pytest.mark.parametrize("seeds", [range(230, 242), pytest.param(range(1000), marks=pytest.mark.slow)])
@pytest.mark.timeout(3600)
def test_random_grammars_do_no_harm(seeds: list[int]) -> None:
    """Some crash the library and some never end: a text under a good grammar goes on beside them."""
    host = make_host(compile_seconds=1.5, mask_seconds=0.5)
    victim = Writer(host, StructuredOutputs(regex="[0-9]*"), seed=1)
    for seed in seeds:
        try:
            writer = Writer(host, random_grammar(seed), seed)
        except GrammarError:
            continue
        standing, end = writer.settle(), time.monotonic() + 3
        while standing is Standing.FOLLOWS and len(writer.tokens) < 12 and time.monotonic() < end:
            standing = writer.write(len(writer.tokens) + 1)
        if standing is Standing.FAILED:
            assert ".cc" not in (writer.text.error or "")
        writer.text.close()
        victim.settle()
        victim.put(ord("5"))
        assert victim.settle() is Standing.FOLLOWS
    assert END in victim.allowed()
    host.close()
