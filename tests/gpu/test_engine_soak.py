"""A short soak on CUDA: each request gives what it gives alone, bit for bit where that was asked for."""

from engine.conftest import tiny  # noqa: F401
from engine.test_engine_soak import soak_bitwise, test_a_short_soak  # noqa: F401


def test_a_short_soak_bit_for_bit(tiny, device):  # noqa: F811
    soak_bitwise(tiny, 60, 1, batch_invariant=True)
