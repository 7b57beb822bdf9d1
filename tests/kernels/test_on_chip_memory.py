"""Who is told how to divide a multiprocessor's memory, and when."""

from types import SimpleNamespace

import pytest

from ostinato.kernels import on_chip_memory


class NotCompiledYet:
    """As Triton postpones a compilation: any attribute would wait for it."""

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
