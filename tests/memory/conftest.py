"""A saver on a CPU, with the debugging option on; `tests/gpu` runs the same tests on CUDA."""

import pytest
import torch


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device("cpu")
