"""The contract of `contract/test_transformers_models.py`, on CUDA."""

from contract.test_transformers_models import *  # noqa: F403
