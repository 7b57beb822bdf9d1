"""The contract of `contract/test_boundary_results.py`, on CUDA."""

from contract.test_boundary_results import *  # noqa: F403
