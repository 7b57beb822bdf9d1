"""The contract of `contract/test_reasons.py`, on CUDA."""

from contract.test_reasons import *  # noqa: F403
