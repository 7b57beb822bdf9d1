"""The CUDA sources compile, on any machine with NVRTC, and stay within what they may take of a GPU."""

import re

import pytest
import torch

pytest.importorskip("triton")

from ostinato.kernels.cuda import compiled
from ostinato.kernels.linear.choice import package_table
from ostinato.kernels.linear.cuda_fragments import fragments_kernel, shared_bytes
from ostinato.kernels.linear.tiles import FragmentsTile

pytestmark = pytest.mark.skipif(not compiled.has_nvrtc(), reason="needs NVRTC and cuda-bindings")

HOPPER = (9, 0)
MOST_SHARED_BYTES = 227 << 10
REGISTERS_OF_A_MULTIPROCESSOR = 65536


def measured_tiles():
    """The tiles of the committed table, with the numbers of tokens that are compiled for."""
    table = package_table("nvidia-h200.json")
    for shape, choices in table.choices.items():
        for choice in choices:
            if isinstance(choice.tile, FragmentsTile):
                passes = {choice.tile.tokens_at_a_time(n) for n in range(choice.first, choice.last + 1)}
                yield from ((shape, choice.tile, tokens) for tokens in sorted(passes))


@pytest.mark.parametrize(("shape", "tile", "tokens"), list(measured_tiles()))
def test_a_measured_tile_compiles_without_spilling_much(shape, tile, tokens):
    assert tile.fits(shape)
    norm = shape.in_features <= shape.out_features
    kernel = fragments_kernel(tile, shape, tokens, norm=norm, residual=not norm)
    options = [*compiled._options(HOPPER, kernel._constants), "--ptxas-options=-v"]
    _, said = compiled._compile((compiled._FOLDER / kernel._file).read_text(), kernel._file, options)
    assert int(re.search(r"(\d+) bytes spill stores", said)[1]) <= 64
    assert (
        int(re.search(r"Used (\d+) registers", said)[1]) * tile.num_warps * 32
        <= REGISTERS_OF_A_MULTIPROCESSOR
    )
    assert shared_bytes(tile, shape, tokens, norm=norm) <= MOST_SHARED_BYTES


def test_the_launch_knows_how_much_shared_memory_the_source_takes():
    """One byte less than Python computes is refused by the source's own count."""
    shape, tile, tokens = next(iter(measured_tiles()))
    kernel = fragments_kernel(tile, shape, tokens, norm=True)
    source = (compiled._FOLDER / kernel._file).read_text()
    compiled._compile(source, kernel._file, compiled._options(HOPPER, kernel._constants))
    less = {**kernel._constants, "SHARED_BYTES": kernel._constants["SHARED_BYTES"] - 16}
    with pytest.raises(compiled.CudaError, match="the launch knows of less"):
        compiled._compile(source, kernel._file, compiled._options(HOPPER, less))


def test_a_cpu_does_not_support_them():
    assert not compiled.is_supported(torch.device("cpu"))


def test_a_kernel_is_compiled_again_when_what_it_includes_changes(tmp_path, monkeypatch):
    folder, kept = tmp_path / "sources", tmp_path / "kept"
    folder.mkdir()
    monkeypatch.setattr(compiled, "_FOLDER", folder)
    monkeypatch.setattr(compiled, "_cache_folder", lambda: kept)
    (folder / "one.cu").write_text('#include "two.cuh"\nextern "C" __global__ void one(int* x) { *x = two; }')
    for value, versions in ((2, 1), (2, 1), (3, 2)):
        (folder / "two.cuh").write_text(f"constexpr int two = {value};")
        compiled.CudaKernel("one.cu", "one", {}).compile(HOPPER)
        assert len(list(kept.iterdir())) == versions
