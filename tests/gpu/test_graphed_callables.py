"""The contract of `contract/test_graphed_callables.py`, on CUDA."""

from contract.test_graphed_callables import *  # noqa: F403
