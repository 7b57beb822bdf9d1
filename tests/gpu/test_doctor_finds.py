"""The contract of `contract/test_doctor_finds.py`, on CUDA."""

from contract.test_doctor_finds import *  # noqa: F403
