"""The contract of `contract/test_gate.py`, on CUDA."""

from contract.test_gate import *  # noqa: F403
