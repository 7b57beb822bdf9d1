"""The emulator of CUDA kernels: it has all instructions, rounds like torch, and notices broken kernels."""

import math
import re
import shutil
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

pytest.importorskip("triton")

from kernels.cuda_emulator.emulated import EMULATOR, MAY_SKIP, SOURCES, Emulator, EmulatorError
from kernels.emulated_checks import Form, check_attention, check_fragments, check_gemv, check_scaled
from ostinato.kernels.attention.choice import CudaDecodeTile
from ostinato.kernels.linear.tiles import CudaGemvTile, FragmentsTile, MatrixShape, WideTile

needs_compiler = pytest.mark.skipif(MAY_SKIP, reason="needs g++")


def test_instructions_are_in_two_files_and_the_emulator_has_them_all():
    for path in SOURCES.rglob("*.cu*"):
        assert path.name in ("device.cuh", "warpgroup.cuh") or "asm" not in path.read_text(), path.name

    def functions(name: str, folder: Path) -> set[str]:
        return set(re.findall(r"^\w[^(=#]*?(\w+)\(.*\{", (folder / name).read_text(), flags=re.MULTILINE))

    for name, some in (
        ("device.cuh", {"multiply_add", "copy_piece", "send_four"}),
        ("warpgroup.cuh", {"copy_box", "arrive_at", "wait_for_products", "show_to_copies"}),
    ):
        instructions = functions(name, SOURCES / "cuda") - {"described", "__align__"}
        assert some <= instructions
        assert instructions <= functions(name, EMULATOR)


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


class Break(NamedTuple):
    """What is planted."""

    file: str
    old: str
    new: str = ""


FRAGMENT, OLDEST = "{a.x, c.x, a.y, c.y}", "wait_for_copy_groups<SLOTS - 1>();"
THERE = "wait_for_bytes(&shared.{0}_are_there[{2}_slot], step / {1}_SLOTS % 2);"
MEETING = "if (SLICES > 1) wait_for_cluster();"
BREAKS = {
    "wrong registers of a fragment": Break("few_tokens.cu", FRAGMENT, "{a.x, a.y, c.x, c.y}"),
    "copies not waited for": Break("few_tokens.cu", "wait_for_copies();"),
    "parts read before all are there": Break("few_tokens.cu", "#endif\n  __syncthreads();", "#endif"),
    "a cluster that does not meet": Break("few_tokens.cu", MEETING),
    "a count that is not made": Break("few_tokens.cu", "if (threadIdx.x == 0) make_count(&shared.arrived);"),
    "more bytes expected than come": Break("few_tokens.cu", "(num_tokens * kHalves", "(TOKENS * kHalves"),
    "fewer bytes expected than come": Break("few_tokens.cu", " + (NORM ? TOKENS : 0)"),
    "bytes not waited for": Break("few_tokens.cu", "wait_for_bytes(&shared.arrived, false);"),
    "bytes of another lot waited for": Break("few_tokens.cu", "arrived, false", "arrived, true"),
    "a shuffle without all lanes": Break("few_tokens.cu", "squares += __shfl", "if (lane) squares += __shfl"),
    "a token too many": Break("few_tokens.cu", "token >= num_tokens", "token > num_tokens"),
    "half a warp's sum": Break("gemv.cu", "int by = 16", "int by = 8"),
    "a warp's rows twice": Break("gemv.cu", "blockIdx.x * WARPS + threadIdx.x / 32", "blockIdx.x * WARPS"),
    "gate and up the wrong way round": Break("gemv.cu", "r < ROWS ? r", "r >= ROWS ? r - ROWS"),
    "copies waited for too late": Break("kv_stream.cuh", OLDEST, "wait_for_copy_groups<SLOTS>();"),
    "rows copied that are not seen": Break("kv_stream.cuh", "row >= least && row < end", "true"),
    "a counter left behind": Break("decode_attention.cu", "*counter = 0;", ";"),
    "tiles fetched over those that are multiplied": Break("wide.cu", "wait_for_all_but_last();"),
    "weights not waited for": Break("wide.cu", THERE.format("weights", "WEIGHT", "weight")),
    "tokens not waited for": Break("wide.cu", THERE.format("tokens", "TOKEN", "token")),
    "a group of warps that is not asked": Break("wide.cu", "kGroups);", "1);"),
    "a slice in the wrong place": Break(
        "wide.cu", "shared.sums_from(work.slice, owner)", "shared.from_cluster"
    ),
    "sums over tiles": Break("wide.cu", "__syncthreads();  // no tile is needed any more"),
    "sums that others do not wait for": Break(
        "wide.cu", "wait_for_bytes(&shared.sums_are_there, false);", ";"
    ),
    "some squares twice": Break("wide_results.cuh", "part = share() + i * kShares", "part = i * kShares"),
    "rows and tokens the wrong way round": Break("wide.cu", "place * kStride + token % kOwned", "place"),
    "a page that is none": Break("kv_stream.cuh", "(long long)page", "~(long long)page"),
}


def check_kernel_with(file: str, emulator: Emulator, num_tokens: int) -> None:
    """The kernel that the file is part of; with so many tokens if it takes any number."""
    if file == "few_tokens.cu":
        tile = FragmentsTile(rows=32, slices=2, num_warps=8, held=2, registers=160)
        check_fragments(emulator, MatrixShape(64, 512), tile, Form(norm=True, bias=True), num_tokens)
    elif file.startswith("wide"):
        tile = WideTile(32, 128, 64, weight_slots=2, token_slots=2, slices=4)
        check_scaled(emulator, MatrixShape(128, 1024), tile, 30, bias=True)
    elif file == "gemv.cu":
        check_gemv(emulator, MatrixShape(24, 512, gated=True), CudaGemvTile(3, 4, 128), Form(norm=True))
    else:
        tile = CudaDecodeTile(2, 3, 4, chunk_tiles=2, max_chunks=2)
        check_attention(emulator, tile, (4, 2, 64), [90, 3, 40, 1], multiprocessors=1)


@needs_compiler
@pytest.mark.parametrize(
    ("file", "num_tokens"),
    [
        ("few_tokens.cu", 3),
        ("few_tokens.cu", 13),
        ("gemv.cu", 1),
        ("wide.cu", 30),
        ("decode_attention.cu", 4),
    ],
)
def test_a_whole_kernel_passes(tmp_path, file, num_tokens):
    """The check that a broken one fails."""
    check_kernel_with(file, Emulator(tmp_path), num_tokens)


FEW_BREAKS = {
    "copies not waited for",
    "a cluster that does not meet",
    "fewer bytes expected than come",
    "bytes of another lot waited for",
    "a shuffle without all lanes",
    "a token too many",
    "half a warp's sum",
    "copies waited for too late",
    "a counter left behind",
    "weights not waited for",
    "a group of warps that is not asked",
    "sums over tiles",
    "a page that is none",
}
"""One for everything that the emulator has to notice; the others are slow."""


@needs_compiler
@pytest.mark.parametrize(
    "what", [each if each in FEW_BREAKS else pytest.param(each, marks=pytest.mark.slow) for each in BREAKS]
)
def test_a_broken_kernel_is_noticed(tmp_path, what):
    file, old, new = BREAKS[what]
    sources = Path(shutil.copytree(SOURCES, tmp_path / "sources"))
    [broken] = sources.rglob(file)
    text = broken.read_text()
    assert old in text
    broken.write_text(text.replace(old, new))
    with pytest.raises((AssertionError, EmulatorError)):
        check_kernel_with(file, Emulator(tmp_path, sources), num_tokens=3)
