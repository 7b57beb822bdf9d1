"""The kernel of prompts, compiled for Hopper without a GPU: what the compiler made of it."""

import re
import subprocess
import tempfile
from functools import cache
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from ostinato.kernels.attention.cuda_queries import THREADS, prompt_kernel
from ostinato.kernels.cuda import compiled

pytestmark = pytest.mark.skipif(not compiled.has_nvrtc(), reason="needs NVRTC and cuda-bindings")
MOST_SHARED_BYTES = 227 << 10


@cache
def built(head_dim: int, group: int, dtype: torch.dtype = torch.bfloat16) -> tuple[bytes, str]:
    """Machine code, and what the compiler said."""
    kernel, _, shared_bytes = prompt_kernel(8 * group, 8, head_dim, 256, dtype)
    assert shared_bytes <= MOST_SHARED_BYTES
    options = [*compiled._options((9, 0), kernel._constants), "--ptxas-options=-v"]
    return compiled._compile(compiled.source(kernel._file), kernel._file, options)


SHAPES = [
    (128, 4, torch.bfloat16),
    (256, 2, torch.bfloat16),
    *(
        pytest.param(*shape, marks=pytest.mark.slow)
        for shape in ((64, 4, torch.bfloat16), (128, 2, torch.bfloat16), (128, 7, torch.float16))
    ),
]


@pytest.mark.parametrize(("head_dim", "group", "dtype"), SHAPES, ids=str)
def test_it_compiles_and_products_overlap(head_dim, group, dtype):
    _, said = built(head_dim, group, dtype)
    # A few words for each tile, and for each block of the warp that only asks for copies.
    assert int(re.search(r"(\d+) bytes spill stores", said)[1]) <= 32
    assert "serialized" not in said


@cache
def assembled(head_dim: int, group: int) -> str:
    """The kernel as the GPU reads it."""
    import triton

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "kernel.cubin")
        file.write_bytes(built(head_dim, group)[0])
        command = [triton.knobs.nvidia.nvdisasm.path, "-c", str(file)]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout


@pytest.mark.parametrize(("head_dim", "group"), [(128, 4), (256, 2)])
def test_teams_take_no_more_registers_than_the_others_give_up(head_dim, group):
    """They would wait for them without end, and with them every program behind."""
    at_launch = int(re.search(r"Used (\d+) registers", built(head_dim, group)[1])[1])
    [kept] = re.findall(r"USETMAXREG\.DEALLOC\.CTAPOOL (0x\w+)", assembled(head_dim, group))
    [taken] = re.findall(r"USETMAXREG\.TRY_ALLOC\.CTAPOOL UP\d, (0x\w+)", assembled(head_dim, group))
    assert 128 * int(kept, 16) + 256 * int(taken, 16) <= THREADS * at_launch


def test_nothing_is_spilled_while_weights_are_made():
    steps = re.findall(r"gsb0, 0x1(.*?)gsb0, 0x0", assembled(128, 4), re.DOTALL)
    assert len(steps) == 3, "with hidden keys, without, and from a tile to the next"
    assert not any(re.search(r"\b(STL|LDL)\b", step) for step in steps)


def test_weights_are_made_while_sums_are_on_their_way():
    """The assembler moves a wait to where nothing stands in its way: before the weights, if it may."""
    text = assembled(128, 4)
    found = re.findall(r"WARPGROUP\.DEPBAR\.LE gsb0, (0x[01])|(MUFU\.EX2)|(HGMMA)", text)
    words = "".join("E" if exponent else "M" if product else wait[-1] for wait, exponent, product in found)
    # All scores and all sums are asked for; when the scores are there the exponentials; then the sums.
    overlapping = re.findall(r"M{16}1(E+)0", words)
    assert len(overlapping) == 3, "with hidden keys, without, and from a tile to the next"
    assert all(len(exponentials) >= 64 for exponentials in overlapping)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_any_number_of_requests_has_room(head_dim):
    sizes = [prompt_kernel(16, 8, head_dim, requests, torch.bfloat16)[2] for requests in (1, 256, 512, 1024)]
    assert max(sizes) <= MOST_SHARED_BYTES


def test_the_launch_knows_how_much_shared_memory_the_source_takes():
    kernel, _, shared_bytes = prompt_kernel(16, 8, 128, 256, torch.bfloat16)
    constants = {**kernel._constants, "SHARED_BYTES": shared_bytes - 32}
    source = compiled.source(kernel._file)
    with pytest.raises(compiled.CudaError, match="the launch knows of less"):
        compiled._compile(source, kernel._file, compiled._options((9, 0), constants))
