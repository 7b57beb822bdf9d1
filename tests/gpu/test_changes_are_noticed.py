"""The contract of `contract/test_changes_are_noticed.py`, on CUDA."""

from contract.test_changes_are_noticed import *  # noqa: F403
