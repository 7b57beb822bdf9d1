"""The contract of `contract/test_warmups.py`, on CUDA."""

from contract.test_warmups import *  # noqa: F403
