"""What the CUDA attention kernel is launched with fits a GPU, for any batch, and follows from its class."""

import itertools
import re

import pytest
import torch

pytest.importorskip("triton")

from ostinato.kernels.attention import cuda_decode
from ostinato.kernels.attention.choice import CUDA_MAX_TOKENS, cuda_decode_tile, decode_class
from ostinato.kernels.attention.cuda_decode import decode_kernel
from ostinato.kernels.cuda import compiled
from ostinato.kernels.gpu import Gpu

HOPPER = (9, 0)
MOST_SHARED_BYTES = 227 << 10
REGISTERS = 64 << 10
"""Of a multiprocessor."""
GROUPS = (1, 2, 3, 4, 7, 8, 9, 16)
HEAD_DIMS = (64, 80, 128)


def kernel_of(
    num_requests: int,
    num_kv_heads: int,
    group: int,
    head_dim: int = 128,
    multiprocessors: int = 132,
    num_queries: int = 1,
):
    """The kernel, its tile and its shared memory."""
    tile = cuda_decode_tile(num_requests, num_kv_heads, group, Gpu((9, 0), multiprocessors), num_queries)
    kernel, shared_bytes = decode_kernel(
        tile,
        num_requests,
        head_dim=head_dim,
        group=group,
        num_kv_heads=num_kv_heads,
        has_norm=True,
        dtype=torch.bfloat16,
        num_queries=num_queries,
    )
    return kernel, tile, shared_bytes


@pytest.mark.parametrize("num_kv_heads", [1, 2, 8, 32])
def test_programs_fit_a_multiprocessor(num_kv_heads):
    for num_tokens in (1, 2, 4, 8, 16, 17, 32, 33, 64, 128, 256, 257, 1024):
        for group in GROUPS:
            for head_dim in HEAD_DIMS:
                for multiprocessors in (78, 132, 148):
                    size = (num_tokens, num_kv_heads, group, head_dim, multiprocessors)
                    _, tile, shared_bytes = kernel_of(*size)
                    assert shared_bytes <= MOST_SHARED_BYTES
                    assert tile.max_chunks >= 1
                    for num_queries in range(2, min(16, 32 // group) + 1):
                        _, tile, shared_bytes = kernel_of(*size, num_queries=num_queries)
                        assert tile.programs * shared_bytes <= MOST_SHARED_BYTES
                        assert tile.max_chunks >= 1


@pytest.mark.parametrize("num_kv_heads", [1, 2, 8, 32])
@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("multiprocessors", [78, 132])
def test_batches_of_a_class_run_the_same_kernel(num_kv_heads, group, multiprocessors):
    kernels: dict[object, set[object]] = {}
    for num_tokens in range(1, CUDA_MAX_TOKENS[-1] + 1):
        found = decode_class(num_tokens, num_kv_heads, torch.bfloat16, Gpu((9, 0), multiprocessors))
        kernel, *_ = kernel_of(num_tokens, num_kv_heads, group, multiprocessors=multiprocessors)
        kernels.setdefault(found, set()).add(kernel)
    assert all(len(same) == 1 for same in kernels.values())
    assert len(kernels) <= 9


@pytest.mark.parametrize("group", [1, 4, 16])
def test_batches_of_a_class_run_the_same_kernel_for_several_tokens(group):
    kernels: dict[object, set[object]] = {}
    for num_requests, num_queries in itertools.product(range(1, 80), range(2, 32 // group + 1)):
        found = decode_class(num_requests, 8, torch.bfloat16, Gpu((9, 0), 132), num_queries)
        kernel, *_ = kernel_of(num_requests, 8, group, num_queries=num_queries)
        kernels.setdefault(found, set()).add(kernel)
    assert all(len(same) == 1 for same in kernels.values())
    assert len(kernels) <= 2 * (32 // group - 1)


@pytest.fixture(scope="module")
def nvrtc():
    """Present without a GPU too."""
    module = pytest.importorskip("cuda.bindings.nvrtc")
    try:
        module.nvrtcVersion()
    except RuntimeError as missing:
        pytest.skip(f"NVRTC is not installed: {missing}")


def report(constants: dict[str, int]) -> str:
    """What the compiler says about the kernel."""
    source = compiled.source("decode_attention.cu")
    options = [*compiled._options(HOPPER, constants), "--ptxas-options=-v"]
    return compiled._compile(source, "decode_attention.cu", options)[1]


TOKENS_AND_GROUPS = [(1, 2), (8, 4), (32, 8), (256, 16), (1, 16), (256, 2)]
"""Every number of tokens and every group; the other pairs are slow."""


@pytest.mark.parametrize(
    ("num_tokens", "group"),
    [
        pair if pair in TOKENS_AND_GROUPS else pytest.param(*pair, marks=pytest.mark.slow)
        for pair in itertools.product([1, 8, 32, 256], [2, 4, 8, 16])
    ],
)
def test_it_compiles_without_spilling(nvrtc, num_tokens, group):
    kernel, tile, _ = kernel_of(num_tokens, 8, group)
    said = report(kernel._constants)
    assert int(re.search(r"(\d+) bytes spill stores", said)[1]) == 0
    assert int(re.search(r"Used (\d+) registers", said)[1]) * tile.warps * 32 * tile.programs <= REGISTERS


FEW_TOKENS = [(1, 4, 5), (8, 4, 8)]


@pytest.mark.parametrize(
    ("num_requests", "group", "num_queries"),
    [
        case if case in FEW_TOKENS else pytest.param(*case, marks=pytest.mark.slow)
        for case in [*itertools.product((1, 8), (4,), (2, 3, 5, 8)), (8, 8, 4), (8, 2, 16), (1, 16, 2)]
    ],
)
def test_it_compiles_without_spilling_for_several_tokens(nvrtc, num_requests, group, num_queries):
    kernel, tile, _ = kernel_of(num_requests, 8, group, num_queries=num_queries)
    said = report(kernel._constants)
    # 32 heads take all registers there are, and a few more.
    assert int(re.search(r"(\d+) bytes spill stores", said)[1]) <= (40 if num_queries * group == 32 else 0)
    assert int(re.search(r"Used (\d+) registers", said)[1]) * tile.warps * 32 * tile.programs <= REGISTERS


def test_the_launch_knows_how_much_shared_memory_the_source_takes(nvrtc):
    """Somewhat less than Python computes is refused by the source's own count."""
    kernel, _, shared_bytes = kernel_of(1, 8, 2)
    with pytest.raises(compiled.CudaError, match="the launch knows of less"):
        report({**kernel._constants, "SHARED_BYTES": shared_bytes - 16})


def test_counters_end_with_their_cache(monkeypatch):
    """They were kept for every address at which a cache had ever been."""
    monkeypatch.setattr(cuda_decode, "_counters_of_caches", {})
    caches = [torch.zeros(4, 16, 2, 64) for _ in range(5)]
    first = [cuda_decode.counters_of(cache) for cache in caches]
    assert all(cuda_decode.counters_of(cache) is known for cache, known in zip(caches, first, strict=True))
    assert len({id(known) for known in first}) == 5
    caches.clear()
    other = torch.zeros(9, 16, 2, 64)
    assert not cuda_decode.counters_of(other).any()
    assert len(cuda_decode._counters_of_caches) == 1
