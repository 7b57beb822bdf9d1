"""The same tests on CUDA."""

from contract.test_descriptor_argument import *  # noqa: F403
