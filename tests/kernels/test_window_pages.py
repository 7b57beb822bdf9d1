"""Pages before all windows are never read: page 0, which stands in their place, is full of NaN here."""

from unittest.mock import patch

import pytest
import torch

from kernels.cuda_emulator.emulated import Emulator
from kernels.emulated_checks import check_attention
from kernels.interpreted import assert_passes
from kernels.paged_cases import dense_attention, make_case, written_caches
from kernels.window_cases import beginnings_gone, without_beginnings
from ostinato.kernels.attention import get_backend, torch_reference
from ostinato.kernels.attention.batch import WINDOW_ALIGNMENT
from ostinato.kernels.attention.choice import CudaDecodeTile, decode_tile

from .test_cuda_emulated import emulator  # noqa: F401

TORCH = get_backend("torch", "cpu")
LENGTHS = {"decode": [(300, 1), (150, 1), (7, 1)], "mixed": [(200, 1), (300, 19), (9, 9), (277, 40)]}


@pytest.mark.parametrize("way", ["tokens", "padded queries", "eager"])
@pytest.mark.parametrize("window", [1, 30, 129])
@pytest.mark.parametrize("name", LENGTHS)
def test_the_reference_reads_windows_only(name: str, window: int, way: str) -> None:
    whole = make_case(LENGTHS[name], dtype=torch.float64, poison=float("nan"))
    case = without_beginnings(whole, window)
    caches = written_caches(case)
    attend = TORCH.attend_eager if way == "eager" else TORCH.attend
    with patch.object(torch_reference, "_GATHER_COST", 1 << 40 if way == "padded queries" else 0):
        out = attend(case.q, *caches, case.batch, scale=case.scale, sliding_window=window)
    torch.testing.assert_close(out, dense_attention(whole, window), atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("which", ["few", pytest.param("all", marks=pytest.mark.slow)])
def test_triton_kernels_read_windows_only(which: str) -> None:
    assert_passes("kernels.window_interpreter_checks", which, 110)


@pytest.mark.parametrize("window", [1, pytest.param(50, marks=pytest.mark.slow)])
def test_the_cuda_kernel_reads_windows_only(emulator: Emulator, window: int) -> None:  # noqa: F811
    tile = CudaDecodeTile(2, 3, 4, chunk_tiles=2, max_chunks=2)
    with beginnings_gone(window):
        check_attention(emulator, tile, (4, 2, 64), [300, 12, 190], window=window)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_tokens", [1, 8, 48, 256])
def test_no_block_of_keys_reaches_back_to_what_is_given_back(dtype: torch.dtype, num_tokens: int) -> None:
    assert WINDOW_ALIGNMENT % decode_tile(dtype, num_tokens, 128).key_block == 0
