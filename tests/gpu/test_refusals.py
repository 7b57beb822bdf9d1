"""The contract of `contract/test_refusals.py`, on CUDA."""

from contract.test_refusals import *  # noqa: F403
