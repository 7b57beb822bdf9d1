"""The contract on any machine: graphs are tapes on the CPU. `tests/gpu` runs the same tests on CUDA."""

import pytest
import torch

pytest.register_assert_rewrite("contract.steps")


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device("cpu")
