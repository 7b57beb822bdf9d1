"""The contract of `contract/test_parts_in_flight.py`, on CUDA."""

from contract.test_parts_in_flight import *  # noqa: F403
