"""The same tests on CUDA."""

from contract.test_rerun import *  # noqa: F403
