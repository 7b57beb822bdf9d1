"""The contract of `contract/test_written_arguments.py`, on CUDA."""

from contract.test_written_arguments import *  # noqa: F403
