"""The contract of `contract/test_transforms.py`, on CUDA."""

from contract.test_transforms import *  # noqa: F403
