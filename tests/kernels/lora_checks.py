"""Random stacks of adapters, and what they should add, in float64 token by token."""

from unittest.mock import patch

import torch
from torch import Tensor

from ostinato.kernels.linear import few_tokens
from ostinato.kernels.linear import ops as linear_ops
from ostinato.kernels.linear.cuda_few_tokens import FusedLayer
from ostinato.kernels.linear.tiles import UNFUSED, Tile
from ostinato.kernels.lora import Adapted, LowRank, Rows, Stack, add
from ostinato.kernels.lora.low_rank import Operands

Device = torch.device | str


def random_stack(
    device: Device,
    dtype: torch.dtype,
    in_features: int,
    parts: tuple[int, ...],
    *,
    num_slots: int = 5,
    max_rank: int = 16,
) -> Stack:
    """Slots of different ranks, from the highest down; the last but one has one part, the last nothing."""
    stack = Stack.empty(num_slots, max_rank, in_features, parts, dtype=dtype, device=torch.device(device))

    def low_rank(rows: int, rank: int) -> LowRank:
        a, b = torch.randn(rank, in_features) * in_features**-0.5, torch.randn(rows, rank)
        return LowRank(a.to(device, dtype), b.to(device, dtype), scaling=0.5)

    for slot in range(num_slots - 1):
        rank = max(1, max_rank - 3 * slot)
        adapter: list[LowRank | None] = [low_rank(rows, rank) for rows in parts]
        if slot == num_slots - 2:
            adapter[1:] = [None] * (len(parts) - 1)
        stack.put(slot, adapter)
    return stack


def random_slots(device: Device, num_tokens: int, num_slots: int) -> Tensor:
    """Every slot and none."""
    return torch.randint(-1, num_slots, (num_tokens,), dtype=torch.int32).to(device)


def wanted_delta(x: Tensor, stack: Stack, slots: Tensor) -> Tensor:
    """float64 [T, out]."""
    delta = torch.zeros(x.size(0), sum(stack.parts), dtype=torch.float64, device=x.device)
    for token, slot in enumerate(slots.tolist()):
        if slot >= 0:
            shrunk = (stack.a[slot].double() @ x[token].double()).split(stack.room)
            blocks = stack.b[slot].double().split(list(stack.parts))
            delta[token] = torch.cat([block @ inner for block, inner in zip(blocks, shrunk, strict=True)])
    return delta


def check_add(
    device: Device,
    dtype: torch.dtype,
    num_tokens: int,
    in_features: int,
    parts: tuple[int, ...],
    *,
    product_dtype: torch.dtype | None = None,
    num_slots: int = 5,
    max_rank: int = 16,
    tolerance: float = 1e-5,
) -> None:
    """Right for every token; no bit of others is touched, whatever their neighbours' adapters are."""
    torch.manual_seed(num_tokens)
    stack = random_stack(device, dtype, in_features, parts, num_slots=num_slots, max_rank=max_rank)
    x = torch.randn(num_tokens, in_features).to(device, dtype)
    product = torch.randn(num_tokens, sum(parts)).to(device, product_dtype or dtype)
    slots = random_slots(device, num_tokens, num_slots)
    slots[-1] = 0
    found = product.clone()
    add(x, found, stack, Rows.of(slots, num_slots))
    wanted = product.double() + wanted_delta(x, stack, slots)
    assert (found.double() - wanted).abs().max() < tolerance * wanted.abs().max()
    assert torch.equal(found[slots < 0], product[slots < 0])
    assert not torch.equal(found[-1], product[-1])
    # An adapter that is broken, and tokens in another order, change nothing for others.
    stack.b[0] = float("inf")
    order = torch.randperm(num_tokens, device=device)
    again = product[order]
    add(x[order], again, stack, Rows.of(slots[order], num_slots))
    others = slots[order] != 0
    assert torch.equal(again[others], found[order][others])
    assert not again[~others].isfinite().any()


def parts_of(out_features: int, *, gated: bool) -> tuple[int, ...]:
    """As a layer might have them."""
    if gated:
        return (out_features, out_features)
    first = out_features // 2
    second = out_features // 4
    return (first, second, out_features - first - second)


def exact(adapted: Adapted) -> Adapted:
    """In float64, for plain torch."""
    stack = adapted.stack
    return Adapted(
        Stack(stack.a.double(), stack.b.double(), stack.ranks, stack.parts), Rows(adapted.rows.slots)
    )


def check_fused(
    device: Device,
    dtype: torch.dtype,
    shape: tuple[int, int, int],
    tile: Tile,
    *,
    norm: bool = False,
    gated: bool = False,
    bias: bool = False,
    residual: bool = False,
    max_rank: int = 16,
    num_slots: int = 5,
    tolerance: float = 1e-4,
) -> None:
    """A kernel that multiplies shape (tokens, out, in) and gates, or adds, with adapters among the tokens."""
    num_tokens, out_features, in_features = shape
    torch.manual_seed(num_tokens)

    def random(*size: int) -> Tensor:
        return torch.randn(size).to(device, dtype)

    x, weight = (
        random(num_tokens, in_features),
        random(out_features * (1 + gated), in_features) * in_features**-0.5,
    )
    biases, norm_weight = random(weight.size(0)) if bias else None, random(in_features) if norm else None
    rest = random(num_tokens, out_features) if residual else None
    sizes = {"max_rank": max_rank, "num_slots": num_slots}
    stack = random_stack(device, dtype, in_features, parts_of(out_features, gated=gated), **sizes)
    several = random_slots(device, num_tokens, num_slots)
    for slots in ([0], [1], [3], [4], [-1]) if num_tokens == 1 else (several,):
        rows = Rows.in_blocks(torch.as_tensor(slots, dtype=torch.int32, device=device), stack.num_slots)
        adapted = Adapted(stack, rows)
        with patch.object(linear_ops, "choose_for", lambda *_: tile):
            if isinstance(tile, UNFUSED):
                assert gated
                adapters = Operands.of(adapted)
                found = linear_ops.multiply_and_gate_adapted(x, weight, biases, adapters)
                without = linear_ops.multiply(x, weight, biases, True, dtype)
            else:
                layer = FusedLayer(x, weight, biases, norm_weight, 1e-5, gated, rest, torch.float32)
                found = linear_ops.project_few_adapted_tokens(layer, Operands.of(adapted))
                without = linear_ops.project_few_tokens(layer)
        wanted = few_tokens.reference(
            *(None if tensor is None else tensor.double() for tensor in (x, weight, biases)),
            norm_weight=None if norm_weight is None else norm_weight.double(),
            eps=1e-5,
            gated=gated,
            residual=None if rest is None else rest.double(),
            adapted=exact(adapted),
        )
        assert (found.double() - wanted).abs().max() < tolerance * wanted.abs().max()
        alone = rows.slots < 0
        assert torch.equal(found[alone], without[alone]), "the bits of a step without adapters"
        assert (stack.ranks[rows.slots[~alone].long()] == 0).all() or not torch.equal(found, without)


def check_broken_slot(
    device: Device,
    dtype: torch.dtype,
    shape: tuple[int, int, int],
    tile: Tile,
    *,
    max_rank: int = 16,
    num_slots: int = 5,
) -> None:
    """A gated product; an adapter with something infinite, or NaN, reaches its own tokens and nobody else."""
    num_tokens, out_features, in_features = shape
    torch.manual_seed(num_tokens)
    x = torch.randn(num_tokens, in_features).to(device, dtype)
    weight = (torch.randn(2 * out_features, in_features) * in_features**-0.5).to(device, dtype)
    parts = (out_features, out_features)
    stack = random_stack(device, dtype, in_features, parts, max_rank=max_rank, num_slots=num_slots)
    slots = torch.arange(num_tokens, dtype=torch.int32, device=device) % (num_slots + 1) - 1
    adapted = Adapted(stack, Rows.in_blocks(slots, num_slots))

    def run() -> Tensor:
        with patch.object(linear_ops, "choose_for", lambda *_: tile):
            return linear_ops.multiply_and_gate_adapted(x, weight, None, Operands.of(adapted))

    before = run()
    assert before.isfinite().all()
    for value, row in ((torch.inf, 0), (torch.nan, out_features + 1)):
        stack.b[1, row, 0] = value
        found = run()
        assert torch.equal(found[slots != 1], before[slots != 1])
        assert not found[slots == 1, row % out_features].isfinite().any()
