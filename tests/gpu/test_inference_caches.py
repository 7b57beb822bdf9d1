"""The contract of `contract/test_inference_caches.py`, on CUDA."""

from contract.test_inference_caches import *  # noqa: F403
