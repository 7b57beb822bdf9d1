"""The contract suite again, on a CUDA device: the modules here re-run the tests of `tests/contract`."""

import pytest
import torch

pytest.register_assert_rewrite("contract.steps")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    if not torch.cuda.is_available():
        pytest.skip("tests/gpu needs a CUDA device and torch sees none")


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())
