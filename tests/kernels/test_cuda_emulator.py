"""The emulator of CUDA kernels: it has all instructions, rounds like torch, and notices broken kernels."""

import math
import re
import shutil
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from kernels.cuda_emulator.emulated import EMULATOR, MAY_SKIP, SOURCES, Emulator, EmulatorError
from kernels.emulated_checks import Form, check_attention, check_fragments
from ostinato.kernels.attention.decode_tiles import CudaDecodeTile
from ostinato.kernels.linear.tiles import FragmentsTile, MatrixShape

needs_compiler = pytest.mark.skipif(MAY_SKIP, reason="needs g++")


def test_instructions_are_in_one_file_and_the_emulator_has_them_all():
    for path in SOURCES.glob("*.cu*"):
        assert path.name == "device.cuh" or "asm" not in path.read_text(), path.name

    def functions(header: Path) -> set[str]:
        return set(re.findall(r"^\w[^(=#]*?(\w+)\(.*\{", header.read_text(), flags=re.MULTILINE))

    instructions = functions(SOURCES / "device.cuh")
    assert {"multiply_add", "copy_piece", "store_remote"} <= instructions
    assert instructions <= functions(EMULATOR / "device.cuh")


CONVERSIONS = """
#include "device.cuh"
extern "C" __global__ void convert(const float* x, Element* y, float* z, int count) {
  for (int i = threadIdx.x; i < count; i += 32) {
    y[i] = (Element)rounded(x[i], 0.f);
    z[i] = high(rounded(0.f, x[i]));
  }
}
"""


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_the_emulator_rounds_like_torch(tmp_path, dtype):
    torch.manual_seed(0)
    special = [0.0, -0.0, math.inf, -math.inf, math.nan, 65519.0, 65520.0, 6e-8, 2.9e-8, 2049.0, 2051.0]
    x = torch.cat([torch.tensor(special), torch.randn(999) * 2.0 ** torch.randint(-30, 20, (999,))])
    y, z = torch.empty(x.shape, dtype=dtype), torch.empty_like(x)
    (tmp_path / "conversions.cu").write_text(CONVERSIONS)
    kernel = Emulator(tmp_path, tmp_path).kernel("conversions.cu", "convert", HALF=dtype == torch.float16)
    kernel.launch(grid=(1, 1, 1), block=32, args=(x, y, z, x.numel()))
    torch.testing.assert_close(y, x.to(dtype), rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(z, x.to(dtype).float(), rtol=0, atol=0, equal_nan=True)
    with pytest.raises(AssertionError, match="not the parameters"):
        kernel.launch(grid=(1, 1, 1), block=32, args=(x, y, z, 1.0))


FRAGMENT, OLDEST = "{a.x, c.x, a.y, c.y}", "wait_for_copy_groups<SLOTS - 1>();"
BREAKS = {
    "wrong registers of a fragment": ("fragments.cu", FRAGMENT, "{a.x, a.y, c.x, c.y}"),
    "copies not waited for": ("fragments.cu", "if (done == 0) wait_for_copies();", ""),
    "parts read before all are there": ("fragments.cu", "#endif\n    __syncthreads();", "#endif"),
    "a cluster that does not meet": ("fragments.cu", "      wait_for_cluster();\n", ""),
    "a shuffle without all lanes": ("fragments.cu", "squares += __shfl", "if (lane) squares += __shfl"),
    "a token too many": ("fragments.cu", "token >= tokens_here", "token > tokens_here"),
    "copies waited for too late": ("kv_stream.cuh", OLDEST, "wait_for_copy_groups<SLOTS>();"),
    "rows copied that are not seen": ("kv_stream.cuh", "row >= least && row < end", "true"),
    "a counter left behind": ("decode_attention.cu", "*counter = 0;", ";"),
    "a page that is none": ("kv_stream.cuh", "(long long)page", "~(long long)page"),
}


def check_kernel_with(file: str, emulator: Emulator) -> None:
    """The kernel that the file is part of."""
    if file == "fragments.cu":
        tile = FragmentsTile(rows=32, slices=2, num_warps=8, held=2, registers=160)
        check_fragments(emulator, MatrixShape(64, 512), tile, Form(norm=True, bias=True), 3)
    else:
        tile = CudaDecodeTile(2, 3, 4, chunk_tiles=2, max_chunks=2, longest_first=True)
        check_attention(emulator, tile, (4, 2, 64), [90, 3, 40, 1], multiprocessors=1)


@needs_compiler
@pytest.mark.parametrize("file", ["fragments.cu", "decode_attention.cu"])
def test_a_whole_kernel_passes(tmp_path, file):
    """The check that a broken one fails."""
    check_kernel_with(file, Emulator(tmp_path))


@needs_compiler
@pytest.mark.parametrize("what", BREAKS)
def test_a_broken_kernel_is_noticed(tmp_path, what):
    file, old, new = BREAKS[what]
    sources = Path(shutil.copytree(SOURCES, tmp_path / "sources"))
    text = (sources / file).read_text()
    assert old in text
    (sources / file).write_text(text.replace(old, new))
    with pytest.raises((AssertionError, EmulatorError)):
        check_kernel_with(file, Emulator(tmp_path, sources))
