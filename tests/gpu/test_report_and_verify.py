"""The contract of `contract/test_report_and_verify.py`, on CUDA."""

from contract.test_report_and_verify import *  # noqa: F403
