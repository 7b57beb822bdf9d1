"""The contract of `contract/test_buffers_properties.py`, on CUDA."""

from contract.test_buffers_properties import *  # noqa: F403
