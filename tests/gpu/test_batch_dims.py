"""The contract of `contract/test_batch_dims.py`, on CUDA."""

from contract.test_batch_dims import *  # noqa: F403
