"""The contract of `contract/test_wrapper_is_the_module.py`, on CUDA."""

from contract.test_wrapper_is_the_module import *  # noqa: F403
