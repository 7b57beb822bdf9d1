"""The contract of `contract/test_autocast.py`, on CUDA."""

from contract.test_autocast import *  # noqa: F403
