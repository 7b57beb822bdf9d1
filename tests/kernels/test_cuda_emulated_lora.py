"""`shrink.cu`, `one_token.cu` and what launches them, without a GPU: right in the emulator."""

from unittest.mock import patch

import pytest
import torch

pytest.importorskip("triton")

from kernels.cuda_emulator.emulated import MAY_SKIP, Emulator
from kernels.emulated_checks import in_blocks, random_bf16
from kernels.lora_checks import random_stack, wanted_delta
from ostinato.kernels.lora import cuda_one_token, cuda_shrink
from ostinato.kernels.lora.adapter_rows import ToShrink
from ostinato.kernels.lora.choice import tokens_together

pytestmark = pytest.mark.skipif(MAY_SKIP, reason="needs g++")


@pytest.fixture(scope="module")
def emulator(tmp_path_factory):
    return Emulator(tmp_path_factory.mktemp("kernels"))


def wanted_left(x, norm_weight, stack, slots):
    """float64 [T, parts * room]; zeros without an adapter."""
    if norm_weight is not None:
        x = (x.float() * norm_weight.float()).bfloat16()
    left = torch.einsum("tri,ti->tr", stack.a[slots.long().clamp(min=0)].double(), x.double())
    return torch.where((slots >= 0)[:, None], left, 0.0)


SHRINK = {
    "one slice, uneven": (96, (48,), 16, False, 5, 20),
    "two slices, parts, more ranks": (1312, (64, 32, 32), 40, True, 5, 40),
    "a cluster takes blocks in turn": (4096, (32,), 16, True, 20, 30),
    "blocks of 16": (256, (32,), 16, False, 5, 70),
}


def with_slow(cases, *slow):
    return [pytest.param(name, marks=[pytest.mark.slow] if name in slow else []) for name in cases]


@pytest.mark.parametrize("name", with_slow(SHRINK, "one slice, uneven", "blocks of 16"))
def test_tokens_shrink_to_ranks(emulator, name):
    in_features, parts, max_rank, norm, num_slots, num_tokens = SHRINK[name]
    torch.manual_seed(1)
    stack = random_stack("cpu", torch.bfloat16, in_features, parts, num_slots=num_slots, max_rank=max_rank)
    slots = torch.randint(-1, num_slots, (num_tokens,), dtype=torch.int32)
    slots[:18] = slots[:18].clamp(max=0) if num_slots == 5 else slots[:18]
    rows = in_blocks(slots, num_slots, tokens_together(num_tokens))
    x = random_bf16(num_tokens, in_features + 16)[:, :in_features]
    norm_weight = random_bf16(in_features) if norm else None
    found = torch.full((num_tokens, stack.a.size(1)), torch.nan)
    with patch.object(cuda_shrink, "cuda_kernel", emulator.kernel):
        operands = (stack.a, stack.room, stack.ranks, rows.order, rows.blocks)
        cuda_shrink.launch_shrink(ToShrink(x, norm_weight, *operands), found)
    assert rows.blocks[4, 0] == 1, "tokens are complete"
    wanted = wanted_left(x, norm_weight, stack, slots)
    is_there = torch.arange(stack.room) < ((stack.ranks + 15) // 16 * 16).clamp(min=16)[:, None]
    is_there = (is_there[slots.long()] & (slots >= 0)[:, None]).repeat(1, len(parts))
    assert is_there.any()
    assert found[~is_there].isnan().all(), "only what somebody has is written"
    torch.testing.assert_close(found[is_there].double(), wanted[is_there], atol=1e-4, rtol=1e-4)


ONE_TOKEN = {
    "uneven": (264, (136, 24), 16, False),
    "parts, norm": (2304, (128, 64, 64), 16, True),
    "more ranks than wait": (512, (72, 72), 100, True),
}


@pytest.mark.parametrize("name", with_slow(ONE_TOKEN, "uneven", "more ranks than wait"))
def test_what_one_token_gets(emulator, name):
    in_features, parts, max_rank, norm = ONE_TOKEN[name]
    torch.manual_seed(1)
    stack = random_stack("cpu", torch.bfloat16, in_features, parts, max_rank=max_rank)
    x, norm_weight = random_bf16(1, in_features), random_bf16(in_features) if norm else None
    scaled = x if norm_weight is None else (x.float() * norm_weight.float()).bfloat16()
    for slot in (0, 2, 3, 4, -1):
        slots = torch.tensor([slot], dtype=torch.int32)
        deltas = torch.full((1, sum(parts)), torch.nan)
        with patch.object(cuda_one_token, "cuda_kernel", emulator.kernel):
            matrices = (stack.a, stack.b, stack.ranks, slots)
            operands = cuda_one_token.OneToken(x, norm_weight, *matrices, *stack.first_rows)
            cuda_one_token.launch_one_token(operands, deltas)
        if slot < 0:
            assert deltas.isnan().all(), "nothing is written"
            continue
        wanted = wanted_delta(scaled, stack, slots)
        torch.testing.assert_close(deltas.double(), wanted, atol=1e-4, rtol=1e-4)
