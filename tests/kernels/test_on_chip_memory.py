"""Who is told how to divide a multiprocessor's memory, and when."""

from types import SimpleNamespace

import pytest
import torch

from ostinato.kernels import on_chip_memory
from ostinato.kernels.compiling import compile_ahead


class NotCompiledYet:
    """As Triton postpones a compilation: any attribute would wait for it."""

    def result(self) -> object:
        return SimpleNamespace(function=79, run=print)

    def __getattr__(self, name: str) -> object:
        raise AssertionError(f"{name} was asked for, which waits for the compiler")


def test_a_kernel_is_told_once_and_only_when_it_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[tuple[object, int]] = []
    monkeypatch.setattr(on_chip_memory, "prefer", lambda function, percent: told.append((function, percent)))
    monkeypatch.setattr(on_chip_memory, "_has_driver", lambda: True)
    monkeypatch.setattr(on_chip_memory, "_with_much_l1", set())
    kernel = SimpleNamespace(function=None)
    for launched in (None, NotCompiledYet(), kernel):
        on_chip_memory.prefer_l1(launched)
    assert told == []
    kernel.function = 77
    for _ in range(2):
        on_chip_memory.prefer_l1(kernel)
    assert told == [(77, on_chip_memory.MOSTLY_L1)]
    monkeypatch.setattr(on_chip_memory, "_has_driver", lambda: False)
    on_chip_memory.prefer_l1(SimpleNamespace(function=78))
    assert len(told) == 1, "without NVIDIA's bindings nobody is told"


def test_a_kernel_that_was_only_collected_is_told_before_its_first_launch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Which may be that of a capture."""
    told: list[object] = []
    monkeypatch.setattr(on_chip_memory, "prefer", lambda function, percent: told.append(function))
    monkeypatch.setattr(on_chip_memory, "_has_driver", lambda: True)
    monkeypatch.setattr(on_chip_memory, "_with_much_l1", set())
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    collected, other = NotCompiledYet(), NotCompiledYet()
    on_chip_memory.prefer_l1(collected)
    compile_ahead._load(other, torch.device("cuda"))
    assert told == []
    compile_ahead._load(collected, torch.device("cuda"))
    assert told == [79]
