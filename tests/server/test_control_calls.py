"""Calls in the engine's process: each is answered once, between steps, and none of them ends the engine."""

import select
import threading
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import torch

from ostinato.engine.parameters.sampling_params import RequestError
from ostinato.engine.sleeping.sleeper import EngineAsleepError
from ostinato.memory import SaverMemoryError
from ostinato.models.errors import WeightsError
from ostinato.server.engine_process.control_calls import Control, ControlCalls, Waiting
from ostinato.server.engine_process.heartbeat import Heartbeat
from ostinato.server.wire.messages import Call, Fault, Reply, packed


class Calls:
    """Calls of some controls, and what became of them."""

    def __init__(self, **controls: Control) -> None:
        self.replies: list[Reply] = []
        self.num_settled = 0
        self.heartbeat = Heartbeat(None, "")  # type: ignore[arg-type]
        self.calls = ControlCalls(
            controls, settle=self._settle, reply=self.replies.append, heartbeat=self.heartbeat
        )

    def _settle(self) -> None:
        self.num_settled += 1

    def ask(self, name: str, number: int = 1, **payload: Any) -> None:
        self.heartbeat.at_work()
        self.calls.begin(Call(number, name, packed(payload)))

    def wait_for_bell(self) -> None:
        assert select.select([self.calls.bell], [], [], 10)[0], "nobody rang"

    @property
    def results(self) -> list[Any]:
        return [msgspec.json.decode(reply.result) for reply in self.replies]


def raising(error: Exception) -> Callable[[], None]:
    def control() -> None:
        raise error

    return control


def test_a_call_gets_its_payload_and_is_answered_at_rest() -> None:
    calls = Calls(add=lambda one, more: one + len(more))
    calls.ask("add", one=1, more=b"\x00\xff")
    assert calls.results == [3]
    assert calls.num_settled == 1


@pytest.mark.parametrize(
    ("error", "fault"),
    [
        (RequestError("no such level"), Fault.CALLER),
        (WeightsError("no such weight"), Fault.CALLER),
        (FileNotFoundError("no such file"), Fault.CALLER),
        (EngineAsleepError("released: weights"), Fault.STATE),
        (SaverMemoryError("the host is full"), Fault.MEMORY),
        (torch.OutOfMemoryError("the device is full"), Fault.MEMORY),
        (TimeoutError("nobody came"), Fault.TIME),
        (RuntimeError("the device"), Fault.ENGINE),
        (KeyError("a bug"), Fault.ENGINE),
    ],
)
def test_what_goes_wrong_is_told_with_its_name(error: Exception, fault: Fault) -> None:
    calls = Calls(fail=raising(error))
    calls.ask("fail")
    [reply] = calls.replies
    assert reply.fault is fault
    assert reply.error == f"{type(error).__name__}: {error}"


def test_only_what_is_listed_can_be_named() -> None:
    calls = Calls(one=lambda: 1)
    for name in ("two", "__class__", ""):
        calls.ask(name)
    calls.ask("one", extra=1)
    assert [reply.fault for reply in calls.replies] == [Fault.CALLER] * 3 + [Fault.ENGINE]


def test_a_control_waits_for_turns_of_the_loop_while_others_are_answered() -> None:
    left = [1, 2, 3]

    def until_empty() -> Waiting:
        while left:
            yield
        return "empty"

    calls = Calls(until_empty=until_empty, take=left.pop)
    calls.ask("until_empty", 1)
    for number in (2, 3, 4):
        calls.calls.carry_on()
        calls.ask("take", number)
    assert [reply.call for reply in calls.replies] == [2, 3, 4]
    calls.calls.carry_on()
    assert calls.results[-1] == "empty"
    assert calls.num_settled == 4, "waiting for a turn stops no step"
    calls.calls.carry_on()
    assert len(calls.replies) == 4


def test_a_control_has_something_done_beside_the_steps() -> None:
    gate, done_by = threading.Event(), []

    def receive() -> int:
        assert gate.wait(10)
        done_by.append(threading.current_thread())
        return 6

    def fail() -> None:
        raise TimeoutError("the other side has gone")

    def both() -> Waiting:
        found = yield receive
        try:
            yield fail
        except TimeoutError as error:
            return [found, str(error)]

    calls = Calls(both=both)
    calls.ask("both")
    for _ in range(3):
        calls.calls.carry_on()
    assert not calls.replies
    gate.set()
    for _ in range(2):
        calls.wait_for_bell()
        calls.calls.carry_on()
    assert calls.results == [[6, "the other side has gone"]]
    assert done_by != [threading.current_thread()]
    assert calls.num_settled == 3, "no step is under way behind a wait"


def test_a_long_call_is_no_long_step() -> None:
    calls = Calls(look=lambda: calls.heartbeat._busy_since)
    calls.ask("look")
    assert calls.results == [None]
    assert calls.heartbeat._busy_since is not None
