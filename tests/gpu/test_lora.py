"""The kernels of adapters on the GPU, at the shapes of real models and at odd ones."""

import pytest
import torch

from gpu.test_fused_kernels import _of_kind
from kernels import lora_checks
from ostinato.kernels.cuda import compiled
from ostinato.kernels.gpu import gpu_of
from ostinato.kernels.linear.rules import gemv_tile
from ostinato.kernels.linear.tiles import (
    CudaGemvTile,
    FragmentsTile,
    MatrixShape,
    SkinnyTile,
    StreamedTile,
    WideTile,
)
from ostinato.kernels.lora import Rows, division

QKV, DOWN, GATE_UP = (4096, (4096, 1024, 1024)), (14336, (4096,)), (4096, (14336, 14336))


@pytest.mark.parametrize("num_tokens", [1, 7, 32, 100, 256, 700])
@pytest.mark.parametrize(("width", "parts"), [QKV, DOWN, GATE_UP, (100, (40, 24, 24))], ids=str)
def test_adapters_add_to_products(device, num_tokens, width, parts):
    lora_checks.check_add(device, torch.bfloat16, num_tokens, width, parts, tolerance=2e-2)


@pytest.mark.parametrize(
    ("dtype", "product", "max_rank", "num_slots", "tolerance"),
    [
        (torch.float32, torch.float32, 16, 5, 1e-4),
        (torch.float16, torch.float16, 64, 5, 4e-3),
        (torch.bfloat16, torch.float32, 256, 5, 2e-2),
        (torch.bfloat16, torch.bfloat16, 8, 64, 2e-2),
    ],
    ids=str,
)
def test_types_ranks_and_slots(device, dtype, product, max_rank, num_slots, tolerance):
    for num_tokens in (1, 40, 300):
        lora_checks.check_add(
            device,
            dtype,
            num_tokens,
            576,
            (320, 64, 64),
            product_dtype=product,
            max_rank=max_rank,
            num_slots=num_slots,
            tolerance=tolerance,
        )


@pytest.mark.parametrize("max_rank", [16, 64])
@pytest.mark.parametrize(
    ("size", "flags"),
    [
        ((6144, 4096), {"norm": True}),
        ((4096, 14336), {"residual": True}),
        ((3072, 1024), {"norm": True, "gated": True}),
        ((200, 1000), {"bias": True}),
    ],
    ids=str,
)
def test_one_token_by_a_fused_kernel(device, size, flags, max_rank):
    tile = gemv_tile(MatrixShape(*size, flags.get("gated", False)), gpu_of(device))
    shape = (1, *size)
    lora_checks.check_fused(device, torch.bfloat16, shape, tile, max_rank=max_rank, tolerance=1e-2, **flags)


@pytest.mark.parametrize(("shape", "tile"), _of_kind(CudaGemvTile, FragmentsTile, StreamedTile), ids=str)
def test_tokens_by_fused_kernels(device, shape, tile):
    if not compiled.is_supported(device):
        pytest.skip("needs Hopper and NVRTC")
    flags = {"norm": True} if shape.in_features <= shape.out_features else {"residual": True}
    for num_tokens in (1,) if isinstance(tile, CudaGemvTile) else (2, 16):
        sizes = (num_tokens, shape.out_features, shape.in_features)
        lora_checks.check_fused(
            device, torch.bfloat16, sizes, tile, gated=shape.gated, tolerance=2e-2, **flags
        )


@pytest.mark.parametrize(
    ("shape", "tile"), [each for each in _of_kind(SkinnyTile, WideTile) if each[0].gated], ids=str
)
def test_gates_behind_products(device, shape, tile):
    if isinstance(tile, WideTile) and not compiled.has_warpgroup_products(device):
        pytest.skip("needs Hopper and NVRTC")
    sizes = (tile.tokens - 3, shape.out_features, shape.in_features)
    lora_checks.check_fused(device, torch.bfloat16, sizes, tile, gated=True, tolerance=2e-2)


@pytest.mark.parametrize(("num_tokens", "num_slots"), [(1, 1), (40, 64), (256, 4), (257, 9), (8192, 64)])
def test_every_token_is_in_one_block_of_its_slot(device, num_tokens, num_slots):
    torch.manual_seed(0)
    slots = lora_checks.random_slots(device, num_tokens, num_slots)
    rows = Rows.of(slots, num_slots)
    order, found = rows.order.tolist(), {}
    for slot, begin, end in rows.blocks.t().tolist():
        if slot >= 0:
            assert 0 < end - begin <= division.tokens_together(num_tokens)
            found.setdefault(slot, []).extend(order[begin:end])
    wanted = {}
    for token, slot in enumerate(slots.tolist()):
        if slot >= 0:
            wanted.setdefault(slot, []).append(token)
    assert found == wanted
