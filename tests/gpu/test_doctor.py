"""The contract of `contract/test_doctor.py`, on CUDA."""

from contract.test_doctor import *  # noqa: F403
