"""`shrink.cu` and `one_token.cu` compile, and take so little of a GPU that they run beside products."""

import re

import pytest

pytest.importorskip("triton")

from kernels.test_cuda_sources import HOPPER, machine_code, weight_loads
from ostinato.kernels.cuda import compiled
from ostinato.kernels.cuda.compiled import CudaKernel
from ostinato.kernels.gpu import Gpu
from ostinato.kernels.linear import cuda_wide
from ostinato.kernels.linear.choice import package_table
from ostinato.kernels.linear.tiles import MatrixShape, WideTile
from ostinato.kernels.lora import cuda_shrink
from ostinato.kernels.lora.cuda_one_token import one_token_kernel
from ostinato.kernels.lora.cuda_shrink import shrink_kernel

pytestmark = pytest.mark.skipif(not compiled.has_nvrtc(), reason="needs NVRTC and cuda-bindings")

REGISTERS, SHARED_BYTES, RESERVED_BYTES = 65536, 228 << 10, 1 << 10
"""Of a multiprocessor; and what each program takes for itself."""


def built(kernel: CudaKernel) -> tuple[str, int, int]:
    """Machine code, registers of a thread, bytes that are spilled."""
    options = [*compiled._options(HOPPER, kernel._constants), "--ptxas-options=-v"]
    code, said = compiled._compile(compiled.source(kernel._file), kernel._file, options)
    registers = int(re.search(r"Used (\d+) registers", said)[1])
    return machine_code(code), registers, int(re.search(r"(\d+) bytes spill stores", said)[1])


@pytest.mark.parametrize(("in_features", "norm", "steps"), [(4096, True, 4), (14336, False, 7)])
def test_the_first_matrix_is_on_its_way_before_the_wait(in_features, norm, steps):
    code, _, spilled = built(shrink_kernel(in_features, 8, norm=norm))
    before, wait, _ = code.partition("ACQBULK")
    assert wait
    assert len(weight_loads(before)) == steps * (1 + norm)
    assert spilled <= 128, "a wait in the middle of loads"


@pytest.mark.parametrize(
    ("in_features", "out_features", "parts"), [(4096, 6144, 3), (4096, 28672, 2), (14336, 4096, 1)]
)
def test_both_matrices_of_one_token_are(in_features, out_features, parts):
    code, registers, spilled = built(
        one_token_kernel(in_features, out_features, parts * 16, 16, norm=parts > 1)
    )
    before, wait, after = code.partition("ACQBULK")
    assert wait
    pieces, rows = in_features // 2048, -(-out_features // (64 * 256))
    assert len(weight_loads(before)) == pieces * (2 * parts + (parts > 1)) + 2 * rows
    assert weight_loads(after) == []
    assert spilled == 0
    assert registers <= 128


def test_a_program_that_shrinks_fits_beside_one_of_a_wide_product():
    """Of Llama-3.1-8B: where it does not, it starts when the product has ended."""
    table = package_table(Gpu((9, 0), 132))
    gate_up, down = MatrixShape(14336, 4096, True), MatrixShape(4096, 14336)
    for shape, behind in ((gate_up, down), (down, gate_up)):
        tile = table.find(shape, 32)
        assert isinstance(tile, WideTile)
        form = {"scaled": shape.gated, "added": not shape.gated, "adapted": True}
        _, of_wide, spilled = built(cuda_wide.wide_kernel(tile, shape, **form))
        _, of_shrink, _ = built(shrink_kernel(behind.in_features, 8, norm=False))
        registers = -(-of_wide // 8) * 8 * -(-tile.num_threads(shape) // 128) * 128
        assert registers + -(-of_shrink // 8) * 8 * 256 <= REGISTERS
        shared = tile.shared_bytes(shape, norm=shape.gated) + cuda_shrink.shared_bytes(8)
        assert shared + 2 * RESERVED_BYTES <= SHARED_BYTES
        assert spilled <= 128, "a wait in the middle of loads"
