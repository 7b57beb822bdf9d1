"""Attention's kernels are accepted by the compilers for every GPU that they run on, and have room there."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch

from ostinato.kernels.attention import choice
from ostinato.kernels.attention.choice import Queries
from ostinato.kernels.cuda import compiled
from ostinato.kernels.gpu import Gpu

triton = pytest.importorskip("triton")

MULTIPROCESSORS = {80: 108, 89: 58, 90: 132, 100: 148, 120: 170}
GPUS = {sm: Gpu((sm // 10, sm % 10), count) for sm, count in MULTIPROCESSORS.items()}
"""A100, L4, H200, B200 and RTX 5090, by compute capability."""
NAMES = {torch.float32: "*fp32", torch.float16: "*fp16", torch.bfloat16: "*bf16"}
INDEX_BUFFERS = ("page_table", "token_rows", "positions", "prefix_lens")
INDEX_BUFFERS += ("req_rows", "seq_lens", "query_starts", "query_lens")
POINTERS = {
    **dict.fromkeys(("partial", "partial_lse", "rotary"), "*fp32"),
    **dict.fromkeys(INDEX_BUFFERS, "*i32"),
    "positions": "*i64",
    "scale": "fp32",
    "eps": "fp32",
}
OPERANDS = ("qkv", "q", "q_norm", "k_norm", "k_cache", "v_cache", "out", "q_out")


@pytest.fixture(autouse=True)
def _not_interpreted():
    if triton.knobs.runtime.interpret:
        pytest.skip("TRITON_INTERPRET is set: there is nothing to compile")


@dataclass(frozen=True)
class Layer:
    """Of a model, on a GPU."""

    capability: int
    head_dim: int
    dtype: torch.dtype = torch.bfloat16
    num_heads: int = 14
    num_kv_heads: int = 2
    window: int = 0

    @property
    def gpu(self) -> Gpu:
        return GPUS[self.capability]

    def queries(self, num_tokens: int, max_context: int) -> Queries:
        heads = (self.num_heads, self.num_kv_heads, self.head_dim)
        requests = min(num_tokens, 256)
        return Queries(self.dtype, num_tokens, requests, num_tokens, max_context, *heads, self.window)

    def shared_bytes(self, kernel: Any, **constants: Any) -> int:
        """Compiles the kernel with these constants, as far as it knows them; its shared memory."""
        from triton.backends.compiler import GPUTarget
        from triton.compiler import ASTSource

        options = {name: constants.pop(name) for name in ("num_warps", "num_stages") if name in constants}
        dim_block = max(16, triton.next_power_of_2(self.head_dim))
        constants |= {"dim_block": dim_block, "page_size": 16, "dependent": self.capability >= 90}
        constants |= {name: getattr(self, name) for name in ("num_heads", "num_kv_heads", "head_dim")}
        constants = {"window": self.window, **constants}
        fixed = {name: value for name, value in constants.items() if name in kernel.arg_names}
        types = {name: POINTERS.get(name, "i32") for name in kernel.arg_names if name not in fixed}
        types |= {name: NAMES[self.dtype] for name in types if name in OPERANDS}
        places = {(kernel.arg_names.index(name),): value for name, value in fixed.items()}
        # As of real tensors: loads of 16 bytes.
        even = [name for name, kind in types.items() if kind[0] == "*" and name not in INDEX_BUFFERS]
        even += [name for name in ("token_stride", "page_table_stride", "least_keys") if name in types]
        hints = {(kernel.arg_names.index(name),): [["tt.divisibility", 16]] for name in even}
        source = ASTSource(kernel, types | dict.fromkeys(fixed, "constexpr"), constexprs=places, attrs=hints)
        target = GPUTarget("cuda", self.capability, 32)
        binary = triton.compile(source, target=target, options={"enable_fp_fusion": False, **options})
        assert binary.asm["cubin"]
        return int(binary.metadata.shared)


def chunks(layer: Layer, num_tokens: int = 64) -> None:
    """A program has as much shared memory as was counted with, and so many fit as are started."""
    from ostinato.kernels.attention import triton_queries

    tile, cut = layer.queries(num_tokens, 32_768).divided(layer.gpu)
    assert cut is not None
    sizes = {"request_block": 256, "steps": cut.steps}
    shared = layer.shared_bytes(triton_queries._attend_chunks, **vars(tile), **sizes)
    programs = -(-cut.programs // layer.gpu.multiprocessors)
    assert shared <= layer.gpu.room_for(programs)


def whole(layer: Layer) -> None:
    from ostinato.kernels.attention import triton_queries

    tile, cut = layer.queries(16_384, 32_768).divided(layer.gpu)
    assert cut is None
    shared = layer.shared_bytes(triton_queries._attend_whole, **vars(tile), request_block=256)
    assert shared <= layer.gpu.room_for(1)


def decode(layer: Layer, num_tokens: int = 8, *, has_prefix: bool = False) -> None:
    from ostinato.kernels.attention import triton_decode

    tile = choice.decode_tile(layer.dtype, num_tokens, layer.head_dim)
    flags = {"is_split": True, "has_norm": True, "has_prefix": has_prefix, "group_block": 16}
    assert layer.shared_bytes(triton_decode._decode, **flags, **vars(tile)) <= layer.gpu.room_for(1)


def prefix(layer: Layer, num_tokens: int = 32) -> None:
    from ostinato.kernels.attention import triton_prefix

    group = layer.num_heads // layer.num_kv_heads
    tile = choice.prefix_tile(layer.dtype, num_tokens, group, layer.head_dim, layer.gpu)
    assert layer.shared_bytes(triton_prefix._attend_prefix, **vars(tile)) <= layer.gpu.room_for(1)


def joins_and_heads(layer: Layer) -> None:
    from ostinato.kernels.attention import triton_decode, triton_heads, triton_queries

    blocks = {"key_block": 64, "least_blocks": 4, "prefix_key_block": 64, "prefix_least_blocks": 2}
    layer.shared_bytes(triton_decode._join, **blocks, part_block=32, has_prefix=True)
    layer.shared_bytes(triton_queries._join_chunks, heads_each=2, part_block=32, steps=10)
    layer.shared_bytes(triton_heads._prepare_heads, has_norm=True, token_block=4, head_block=8, half_block=64)


# Every GPU, heads of 256 where there is least room for them, and on an H200 what prompts run.
FEW = [
    (chunks, Layer(80, 256)),
    (whole, Layer(89, 256)),
    (chunks, Layer(90, 128)),
    (joins_and_heads, Layer(90, 128)),
    (decode, Layer(100, 128)),
    (prefix, Layer(120, 64)),
]
SHAPES = (
    (64, torch.float16, 0),
    (80, torch.bfloat16, 1000),
    (128, torch.bfloat16, 0),
    (256, torch.bfloat16, 0),
    (256, torch.float32, 0),
)
MORE = [
    (kernel, Layer(capability, head_dim, dtype, window=window))
    for capability in GPUS
    for head_dim, dtype, window in SHAPES
    for kernel in (chunks, whole, decode, prefix)
]


@pytest.mark.parametrize(
    ("kernel", "layer"),
    [*FEW, *(pytest.param(*case, marks=pytest.mark.slow) for case in MORE)],
    ids=lambda value: getattr(value, "__name__", None) or str(value)[6:-1],
)
def test_a_triton_kernel_compiles_and_has_room(kernel, layer):
    kernel(layer)


@pytest.mark.parametrize("capability", [(9, 0), (10, 0)], ids=str)
def test_cuda_decode_compiles_where_it_serves(capability):
    """On Hopper and on data centres' Blackwell; others have `triton_decode`."""
    if not compiled.has_nvrtc():
        pytest.skip("needs NVRTC and cuda-bindings")
    from ostinato.kernels.attention.cuda_decode import decode_kernel

    tile = choice.cuda_decode_tile(8, 8, 2, GPUS[90])
    kernel, shared = decode_kernel(
        tile, 8, head_dim=128, group=2, num_kv_heads=8, has_norm=True, dtype=torch.bfloat16
    )
    assert shared <= GPUS[90].room_for(tile.programs)
    options = compiled._options(capability, kernel._constants)
    code, _ = compiled._compile(compiled.source(kernel._file), kernel._file, options)
    assert code
