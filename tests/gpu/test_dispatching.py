"""The contract of `contract/test_dispatching.py`, on CUDA."""

from contract.test_dispatching import *  # noqa: F403
