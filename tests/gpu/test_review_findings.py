"""The contract of `contract/test_review_findings.py`, on CUDA."""

from contract.test_review_findings import *  # noqa: F403
