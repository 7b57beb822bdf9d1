"""The contract of `contract/test_signatures.py`, on CUDA."""

from contract.test_signatures import *  # noqa: F403
