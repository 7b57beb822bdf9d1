"""The contract of `contract/test_replay_proof.py`, on CUDA."""

from contract.test_replay_proof import *  # noqa: F403
