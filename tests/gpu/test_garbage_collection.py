"""The contract of `contract/test_garbage_collection.py`, on CUDA."""

from contract.test_garbage_collection import *  # noqa: F403
