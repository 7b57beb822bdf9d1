"""The contract of `contract/test_first_call.py`, on CUDA."""

from contract.test_first_call import *  # noqa: F403
