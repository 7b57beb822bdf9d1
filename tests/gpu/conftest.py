"""The contract suite again, on a CUDA device: the modules here re-run the tests of `tests/contract`."""

from pathlib import Path

import pytest
import torch

pytest.register_assert_rewrite("contract.steps")

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="tests/gpu needs a CUDA device and torch sees none")
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(skip)


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())
