"""Grids and blocks are what Triton's own functions would make them."""

import pytest

from ostinato.kernels import host_sizes

triton = pytest.importorskip("triton")


def test_they_equal_those_of_triton() -> None:
    for size in range(1, 300):
        assert host_sizes.next_power_of_2(size) == triton.next_power_of_2(size)
        for block in (1, 2, 7, 16, 128):
            assert host_sizes.cdiv(size, block) == triton.cdiv(size, block)
    assert host_sizes.cdiv(0, 16) == triton.cdiv(0, 16)
