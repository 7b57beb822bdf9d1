"""The contract of `contract/test_graphed.py`, on CUDA."""

from contract.test_graphed import *  # noqa: F403
