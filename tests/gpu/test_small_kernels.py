"""The kernels at both ends of a decode step and of sampling, on CUDA."""

import pytest
import torch

from kernels import small_kernel_checks


def test_begin_decode(device: torch.device) -> None:
    small_kernel_checks.check_begin_decode(device)


def test_return_tokens(device: torch.device) -> None:
    small_kernel_checks.check_return_tokens(device)


@pytest.mark.parametrize("width", [500, 49_152, 151_936])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_greedy(device: torch.device, dtype: torch.dtype, width: int) -> None:
    small_kernel_checks.check_greedy(device, dtype, width)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_plain_sampling(device: torch.device, dtype: torch.dtype) -> None:
    small_kernel_checks.check_return_plain(device, dtype)
