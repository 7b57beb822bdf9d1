"""The kernel of prompts' products, compiled for Hopper without a GPU: what the compiler made of it."""

import re
import subprocess
import tempfile
from functools import cache
from pathlib import Path

import pytest

pytest.importorskip("triton")

from ostinato.kernels.cuda import compiled
from ostinato.kernels.linear.cuda_prompt import THREADS, prompt_kernel, shared_bytes
from ostinato.kernels.linear.tiles import MOST_SHARED_BYTES

pytestmark = pytest.mark.skipif(not compiled.has_nvrtc(), reason="needs NVRTC and cuda-bindings")
FORMS = {
    "plain": {"gated": False, "added": False, "bias": False},
    "gated": {"gated": True, "added": False, "bias": False},
    "added": {"gated": False, "added": True, "bias": False},
    "gated, bias": {"gated": True, "added": False, "bias": True},
}


@cache
def built(form: str, **changed: int) -> tuple[bytes, str]:
    """Machine code, and what the compiler said."""
    kernel = prompt_kernel(**FORMS[form])
    options = [*compiled._options((9, 0), kernel._constants | changed), "--ptxas-options=-v"]
    return compiled._compile(compiled.source(kernel._file), kernel._file, options)


@cache
def assembled(form: str) -> str:
    """The kernel as the GPU reads it."""
    import triton

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "kernel.cubin")
        file.write_bytes(built(form)[0])
        command = [triton.knobs.nvidia.nvdisasm.path, "-c", str(file)]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout


@pytest.mark.parametrize("form", FORMS)
def test_it_compiles_and_holds_all_sums_in_registers(form):
    _, said = built(form)
    assert " 0 bytes spill stores, 0 bytes spill loads" in said
    assert "serialized" not in said


@pytest.mark.parametrize("form", ["plain", "gated"])
def test_products_of_a_step_run_while_the_next_ones_are_asked_for(form):
    """Four products, and a wait for those before them alone; for all when there are no more."""
    found = re.findall(r"WARPGROUP\.DEPBAR\.LE gsb0, 0x([01])|(HGMMA)\.64x256x16", assembled(form))
    words = "".join("M" if product else wait for wait, product in found)
    assert re.fullmatch("M{4}10+", words), words


def test_teams_take_no_more_registers_than_the_others_give_up():
    """They would wait for them without end, and with them every program behind."""
    at_launch = int(re.search(r"Used (\d+) registers", built("plain")[1])[1])
    [kept] = re.findall(r"USETMAXREG\.DEALLOC\.CTAPOOL (0x\w+)", assembled("plain"))
    [taken] = re.findall(r"USETMAXREG\.TRY_ALLOC\.CTAPOOL UP\d, (0x\w+)", assembled("plain"))
    assert 128 * int(kept, 16) + 256 * int(taken, 16) <= THREADS * at_launch


def test_the_launch_knows_how_much_shared_memory_the_source_takes():
    needed = shared_bytes()
    assert needed <= MOST_SHARED_BYTES
    with pytest.raises(compiled.CudaError, match="the launch knows of less"):
        built("plain", SHARED_BYTES=needed - 32)
