"""Random stacks of adapters, and what they should add, in float64 token by token."""

import torch
from torch import Tensor

from ostinato.kernels.lora import LowRank, Rows, Stack, add

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
