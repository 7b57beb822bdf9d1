"""The contract of `contract/test_threads.py`, on CUDA."""

from contract.test_threads import *  # noqa: F403
