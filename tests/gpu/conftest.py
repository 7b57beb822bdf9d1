"""The contract suite again, on a CUDA device: the modules here re-run the tests of `tests/contract`."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

pytest.register_assert_rewrite("contract.steps")

# Skipping two thousand tests takes a while: one file says for all of them that there is no GPU.
if not torch.cuda.is_available():
    folder = Path(__file__).parent
    collect_ignore = [file.name for file in folder.glob("test_*.py") if file.name != "test_gate.py"]


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    if not torch.cuda.is_available():
        pytest.skip("tests/gpu needs a CUDA device and torch sees none")


def share_of_the_gpu() -> int:
    """One of how many parts of it this process has."""
    return int(os.environ.get("OSTINATO_GPU_TEST_SHARE", "1"))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """What measures times waits for a GPU that nobody else uses."""
    if share_of_the_gpu() > 1:
        left = [item for item in items if item.get_closest_marker("alone") is not None]
        items[:] = [item for item in items if item not in left]
        config.hook.pytest_deselected(items=left)


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


@pytest.fixture(autouse=True, scope="session")
def share_of_the_memory() -> Iterator[None]:
    """Where files run side by side (`bench/gpu_suite.py --jobs`), engines see their share of the memory:
    each takes nearly all that it sees."""
    share = share_of_the_gpu()
    if share == 1 or not torch.cuda.is_available():
        yield
        return

    def mem_get_info(device: object = None) -> tuple[int, int]:
        total = real()[1] // share
        return max(0, total - torch.cuda.memory_reserved()), total

    real, torch.cuda.mem_get_info = torch.cuda.mem_get_info, mem_get_info
    yield
    torch.cuda.mem_get_info = real
