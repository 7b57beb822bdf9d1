"""The device of the corpus here: `tests/gpu` has another."""

import pytest
import torch


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device("cpu")
