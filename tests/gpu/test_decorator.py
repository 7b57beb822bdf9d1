"""The contract of `contract/test_decorator.py`, on CUDA."""

from contract.test_decorator import *  # noqa: F403
