"""The contract of `contract/test_no_silent_gradients.py`, on CUDA."""

from contract.test_no_silent_gradients import *  # noqa: F403
