"""The contract of `contract/test_settings_are_noticed.py`, on CUDA."""

from contract.test_settings_are_noticed import *  # noqa: F403
