"""The contract of `contract/test_rng.py`, on CUDA."""

from contract.test_rng import *  # noqa: F403
