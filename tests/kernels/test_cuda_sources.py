"""The CUDA sources compile, on any machine with NVRTC, and stay within what they may take of a GPU."""

import re
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import nullcontext
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

import triton

from ostinato.kernels.cuda import compiled
from ostinato.kernels.gpu import Gpu
from ostinato.kernels.linear.choice import package_table
from ostinato.kernels.linear.cuda_few_tokens import few_tokens_kernel, gemv_kernel
from ostinato.kernels.linear.cuda_wide import wide_kernel
from ostinato.kernels.linear.tiles import CudaGemvTile, FragmentsTile, MatrixShape, StreamedTile, WideTile

pytestmark = pytest.mark.skipif(not compiled.has_nvrtc(), reason="needs NVRTC and cuda-bindings")

HOPPER = (9, 0)
MOST_SHARED_BYTES = 227 << 10
REGISTERS_OF_A_MULTIPROCESSOR = 65536


CudaTile = CudaGemvTile | FragmentsTile | StreamedTile | WideTile


def measured_tiles() -> Iterator[tuple[MatrixShape, CudaTile, int]]:
    """The tiles of the committed table, with the numbers of tokens that are compiled for."""
    table = package_table(Gpu((9, 0), 132))
    for shape, choices in table.choices.items():
        for choice in choices:
            if isinstance(choice.tile, CudaGemvTile):
                yield shape, choice.tile, 1
            if isinstance(choice.tile, WideTile):
                yield shape, choice.tile, choice.tile.tokens
            if isinstance(choice.tile, FragmentsTile | StreamedTile):
                passes = {choice.tile.compiled_tokens(n) for n in range(choice.first, choice.last + 1)}
                yield from ((shape, choice.tile, tokens) for tokens in sorted(passes))


MEASURED = list(measured_tiles())
FRAGMENTS, STREAMED, WIDE = (
    next(entry for entry in MEASURED if isinstance(entry[1], kind))
    for kind in (FragmentsTile, StreamedTile, WideTile)
)


def has_norm(shape: MatrixShape) -> bool:
    """Of the matrices of a layer, those that make rows longer follow a norm."""
    return shape.in_features <= shape.out_features


def num_warps(tile: CudaTile, shape: MatrixShape) -> int:
    """Of a program."""
    if isinstance(tile, WideTile):
        return tile.num_threads(shape) // 32
    return tile.num_warps(shape) if isinstance(tile, StreamedTile) else tile.num_warps


@cache
def compiled_for_hopper(shape: MatrixShape, tile: CudaTile, tokens: int) -> tuple[bytes, str]:
    """The kernel in the form in which a layer has it: machine code, and what the compiler said."""
    form = {"norm": has_norm(shape), "residual": not has_norm(shape)}
    if isinstance(tile, CudaGemvTile):
        kernel = gemv_kernel(tile, shape, **form)
    elif isinstance(tile, WideTile):
        kernel = wide_kernel(tile, shape, scaled=has_norm(shape), added=not has_norm(shape))
    else:
        kernel = few_tokens_kernel(tile, shape, tokens, **form)
    options = [*compiled._options(HOPPER, kernel._constants), "--ptxas-options=-v"]
    return compiled._compile(compiled.source(kernel._file), kernel._file, options)


@pytest.mark.parametrize("kind", [CudaGemvTile, FragmentsTile, StreamedTile, WideTile])
def test_a_kernel_that_adds_adapters_compiles_and_asks_for_no_more_memory_before_the_wait(kind):
    """What they add was written by the kernel before. `wide` asks whether its tokens are complete, again and
    again: that is one instruction."""
    shape, tile, tokens = next(entry for entry in MEASURED if isinstance(entry[1], kind))
    form = {"norm": has_norm(shape), "residual": not has_norm(shape), "adapted": True}
    match tile:
        case CudaGemvTile():
            kernel = gemv_kernel(tile, shape, **form)
        case FragmentsTile() | StreamedTile():
            kernel = few_tokens_kernel(tile, shape, tokens, **form)
        case _:
            kernel = wide_kernel(tile, shape, scaled=has_norm(shape), added=not has_norm(shape), adapted=True)
    options = [*compiled._options(HOPPER, kernel._constants), "--ptxas-options=-v"]
    code, said = compiled._compile(compiled.source(kernel._file), kernel._file, options)
    assert int(re.search(r"(\d+) bytes spill stores", said)[1]) <= 64
    before, wait, _ = machine_code(code).partition("ACQBULK")
    assert wait
    strong = [load for load in re.findall(r"\bLDG\S*", before) if "STRONG" in load]
    assert len(strong) == (kind is WideTile)


def machine_code(code: bytes) -> str:
    """The instructions."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(code)
        file.flush()
        disassembler = triton.knobs.nvidia.nvdisasm.path
        return subprocess.check_output([disassembler, "--no-dataflow", file.name], text=True)


@cache
def machine_code_of(shape: MatrixShape, tile: CudaTile, tokens: int) -> str:
    """Of the kernel as a layer has it."""
    return machine_code(compiled_for_hopper(shape, tile, tokens)[0])


@pytest.mark.parametrize(("shape", "tile", "tokens"), MEASURED)
def test_a_measured_tile_compiles_without_spilling_much(shape, tile, tokens):
    assert tile.fits(shape)
    _, said = compiled_for_hopper(shape, tile, tokens)
    assert int(re.search(r"(\d+) bytes spill stores", said)[1]) <= 64
    registers = int(re.search(r"Used (\d+) registers", said)[1])
    assert registers * num_warps(tile, shape) * 32 <= REGISTERS_OF_A_MULTIPROCESSOR
    if not isinstance(tile, CudaGemvTile):
        assert tile.shared_bytes(shape, tokens, norm=has_norm(shape)) <= MOST_SHARED_BYTES


def of_every_form() -> list[Any]:
    """The first of each kind of kernel and layer; the others are slow, because all are taken apart."""
    forms, found = set(), []
    for shape, tile, tokens in MEASURED:
        form = (type(tile), has_norm(shape), shape.gated)
        marks = [pytest.mark.slow] if form in forms else []
        forms.add(form)
        found.append(pytest.param(shape, tile, tokens, marks=marks))
    return found


@pytest.mark.parametrize(("shape", "tile", "tokens"), of_every_form())
def test_weights_are_asked_for_before_the_wait(shape, tile, tokens):
    """All of them, or as many as a warp is ahead.

    The compiler may move loads of constants behind it, which nothing but the time would show.
    """
    listing = machine_code_of(shape, tile, tokens)
    before, wait, after = listing.partition("ACQBULK")
    assert wait, "it does not wait for the previous kernel"
    if isinstance(tile, WideTile):
        assert len(re.findall(r"\bUTMALDG\b", before)) > 0, "no tile is fetched early"
        return
    if isinstance(tile, StreamedTile):
        of_norm = len(weight_loads(before)) - 2 * tile.ahead  # copied in a loop
        assert of_norm > 0 if has_norm(shape) else of_norm == 0
        return
    columns = shape.in_features
    if isinstance(tile, FragmentsTile):
        columns //= tile.slices * tile.num_warps
        rows = tile.rows * (2 if shape.gated else 1) // 8  # a row for each four lanes
        wanted = (rows + has_norm(shape)) * columns // 32
    else:
        wanted = (tile.rows * (2 if shape.gated else 1) + has_norm(shape)) * columns // 256
    assert len(weight_loads(before)) == wanted
    assert weight_loads(after) == []


def weight_loads(listing: str) -> list[str]:
    """Loads of 16 bytes; those of what other kernels write are marked as coherent (`STRONG`)."""
    loads = re.findall(r"\bLDG\S*\.128\S*", listing)
    return [load for load in loads if "STRONG" not in load]


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize(
    ("shape", "tile"), [WIDE[:2], (MatrixShape(64, 256), WideTile(16, 64, 64, 2, 2))], ids=["table", "odd"]
)
def test_the_launch_of_wide_knows_how_much_shared_memory_it_takes(shape, tile, scaled):
    kernel = wide_kernel(tile, shape, scaled=scaled)
    source = compiled.source(kernel._file)
    compiled._compile(source, kernel._file, compiled._options(HOPPER, kernel._constants))
    less = {**kernel._constants, "SHARED_BYTES": kernel._constants["SHARED_BYTES"] - 16}
    with pytest.raises(compiled.CudaError, match="the launch knows of less"):
        compiled._compile(source, kernel._file, compiled._options(HOPPER, less))


@pytest.mark.parametrize(("tokens", "rows"), [(64, 256), (16, 256)])
def test_the_largest_wide_tiles_that_fit_find_their_registers(tokens, rows):
    shape, tile = MatrixShape(rows, 256), WideTile(tokens, rows, 64, 2, 2)
    assert tile.fits(shape)
    kernel = wide_kernel(tile, shape)
    source = compiled.source(kernel._file)
    compiled._compile(source, kernel._file, compiled._options(HOPPER, kernel._constants))


def test_sums_are_shown_before_they_are_copied():
    """Copies read memory another way than stores write it: without the fence it is right most of the time."""
    kernel = wide_kernel(WideTile(64, 64, 64, 2, 2, slices=2), MatrixShape(64, 512))
    source = compiled.source(kernel._file)
    code, _ = compiled._compile(source, kernel._file, compiled._options(HOPPER, kernel._constants))
    listing = machine_code(code)
    before, copy, _ = listing.partition("UBLKCP")
    assert copy
    assert "FENCE.VIEW.ASYNC" in before[before.rindex("STS.128") :]


@pytest.mark.parametrize(
    ("shape", "tile", "tokens"), [each for each in of_every_form() if isinstance(each.values[1], WideTile)]
)
def test_nothing_in_the_loop_of_wide_waits_for_memory_that_is_on_its_way(shape, tile, tokens):
    """A barrier that promises more than it must makes a fence of every step: 140 us where 63 are enough."""
    listing = machine_code_of(shape, tile, tokens)
    assert "HGMMA" in listing
    assert not re.findall(r"MEMBAR\.\S*GPU", listing)
    assert len(re.findall(r"CCTL\.IVALL", listing)) <= 2, "those of the cluster's barrier"


@pytest.mark.parametrize("entry", [FRAGMENTS, STREAMED], ids=["resident", "streamed"])
def test_the_launch_knows_how_much_shared_memory_the_source_takes(entry):
    """One byte less than Python computes is refused by the source's own count."""
    shape, tile, tokens = entry
    kernel = few_tokens_kernel(tile, shape, tokens, norm=True)
    source = compiled.source(kernel._file)
    compiled._compile(source, kernel._file, compiled._options(HOPPER, kernel._constants))
    less = {**kernel._constants, "SHARED_BYTES": kernel._constants["SHARED_BYTES"] - 16}
    with pytest.raises(compiled.CudaError, match="the launch knows of less"):
        compiled._compile(source, kernel._file, compiled._options(HOPPER, less))


def test_a_folder_that_cannot_be_written_to_costs_only_time(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("not a folder")
    monkeypatch.setattr(compiled, "_cache_folder", lambda: tmp_path / "file")
    shape, tile, tokens = FRAGMENTS
    assert few_tokens_kernel(tile, shape, tokens, norm=True).compile(HOPPER)


@pytest.mark.parametrize(("capability", "supported"), [((8, 9), 0), ((9, 0), 1), ((10, 0), 1), ((12, 0), 0)])
def test_gpus_with_less_shared_memory_do_not_support_them(monkeypatch, capability, supported):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    compiled.is_supported.cache_clear()
    assert compiled.is_supported(torch.device("cuda", 0)) == bool(supported)
    compiled.is_supported.cache_clear()


class RecordingDriver:
    """Says yes to everything and remembers what shared memory was asked for."""

    class CUfunction_attribute:
        CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES = "most"

    def __init__(self):
        self.asked = []

    def cuModuleLoadData(self, code):
        return 0, "module"

    def cuModuleGetFunction(self, module, name):
        return 0, "function"

    def cuFuncSetAttribute(self, function, attribute, value):
        self.asked.append((attribute, value))
        return (0,)


def test_every_device_is_told_of_the_shared_memory(monkeypatch):
    driver = RecordingDriver()
    monkeypatch.setattr(compiled, "_driver", lambda: driver)
    monkeypatch.setattr(compiled, "prefer", lambda function, percent: driver.asked.append(("share", percent)))
    monkeypatch.setattr(torch.cuda, "device", lambda _: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(query=lambda: True))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: HOPPER)
    monkeypatch.setattr(compiled.CudaKernel, "compile", lambda self, capability: b"")
    kernel = compiled.CudaKernel("few_tokens.cu", "project", {})
    kernel.load(0, 100_000, 100)
    kernel.load(1, 100_000, 100)
    assert driver.asked == [("most", 100_000), ("share", 100)] * 2


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
