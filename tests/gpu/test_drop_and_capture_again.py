"""The contract of `contract/test_drop_and_capture_again.py`, on CUDA."""

from contract.test_drop_and_capture_again import *  # noqa: F403
