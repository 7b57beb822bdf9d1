"""Kernels on a machine without a GPU: the torch references, and Triton's interpreter in its own process."""

import os

import pytest
import torch

from kernels import unchanged

pytest.register_assert_rewrite("kernels.paged_cases", "kernels.emulated_checks", "kernels.fused_checks")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """One case of each test here, while kernels are as they were when all passed: see `unchanged`."""
    if unchanged.are_asked_for(config.args) or not unchanged.are_unchanged():
        return
    os.environ[unchanged.BRIEF] = "1"
    items[:], left = unchanged.one_of_each(items)
    config.hook.pytest_deselected(items=left)


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
