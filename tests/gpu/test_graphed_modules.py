"""The contract of `contract/test_graphed_modules.py`, on CUDA."""

from contract.test_graphed_modules import *  # noqa: F403
