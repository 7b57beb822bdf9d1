"""The contract of `contract/test_verify_tells.py`, on CUDA."""

from contract.test_verify_tells import *  # noqa: F403
