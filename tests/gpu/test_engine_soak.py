"""A short soak on CUDA: each request gives what it gives alone, bit for bit where that was asked for."""

from engine.conftest import tiny  # noqa: F401
from engine.test_engine_soak import test_a_short_soak, test_a_short_soak_bit_for_bit  # noqa: F401
