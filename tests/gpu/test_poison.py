"""The contract of `contract/test_poison.py`, on CUDA."""

from contract.test_poison import *  # noqa: F403
