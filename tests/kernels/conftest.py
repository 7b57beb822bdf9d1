"""Kernels on a machine without a GPU: the torch references, and Triton's interpreter in its own process."""

import pytest
import torch

pytest.register_assert_rewrite("kernels.paged_cases", "kernels.emulated_checks", "kernels.fused_checks")


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
