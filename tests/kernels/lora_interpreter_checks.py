"""Runs in a process with TRITON_INTERPRET=1 (see `test_lora`); one printed line a check.

python -m kernels.lora_interpreter_checks few|all
"""

import sys
from unittest.mock import patch

import torch

from kernels import lora_checks, unchanged
from ostinato.kernels.linear import ops as linear_ops
from ostinato.kernels.linear import products, triton_skinny
from ostinato.kernels.linear.tiles import GemvTile, Library, SkinnyTile
from ostinato.kernels.linear.weight import Weight
from ostinato.kernels.lora import Adapted, Rows, choice
from ostinato.kernels.lora.low_rank import Operands
from ostinato.kernels.norms import triton_rows

ALL = sys.argv[1:] == ["all"]


def check_grouping() -> None:
    """Every token that has an adapter is in one block of its slot, in order; nobody else is in any."""
    torch.manual_seed(0)
    cases = [(1, 1), (1, 5), (7, 3), (40, 5), (200, 17), (300, 4), *([(700, 64)] if ALL else [])]
    for num_tokens, num_slots in cases:
        slots = lora_checks.random_slots("cpu", num_tokens, num_slots)
        rows = Rows.in_blocks(slots, num_slots)
        found: dict[int, list[int]] = {}
        sizes = []
        for slot, begin, end in rows.blocks[:3].t().tolist():
            if slot >= 0:
                found.setdefault(slot, []).extend(rows.order[begin:end].tolist())
                sizes.append(end - begin)
        wanted = {
            slot: (slots == slot).nonzero().flatten().tolist()
            for slot in range(num_slots)
            if (slots == slot).any()
        }
        assert found == wanted, (num_tokens, num_slots)
        assert rows.blocks[3][rows.blocks[3] >= 0].tolist() == sorted(wanted)
        assert (rows.blocks[3, len(wanted) :] == -1).all(), "nothing behind the last"
        assert all(0 < size <= choice.tokens_together(num_tokens) for size in sizes)
    for slots in (torch.full((33,), -1), torch.zeros(33), torch.arange(33)):
        rows = Rows.in_blocks(slots.int(), 40)
        assert (rows.blocks[0] >= 0).sum() == (0 if slots[0] < 0 else 5 if slots[1] == 0 else 33)


def check_adding() -> None:
    with patch.object(Rows, "of", Rows.in_blocks):
        lora_checks.check_add("cpu", torch.float32, 40, 600, (140, 24, 24), max_rank=33)
        if unchanged.is_brief():
            return
        for num_tokens in (1, 5, *((70, 257) if ALL else ())):
            lora_checks.check_add("cpu", torch.float32, num_tokens, 96, (48,))
            lora_checks.check_add("cpu", torch.float32, num_tokens, 1100, (48, 24, 24), max_rank=20)
        lora_checks.check_add("cpu", torch.float32, 20, 32, (24,), num_slots=19)
        lora_checks.check_add(
            "cpu", torch.float16, 7, 96, (40, 40), product_dtype=torch.float32, tolerance=2e-3
        )
        lora_checks.check_add("cpu", torch.float32, 260, 32, (24, 24), num_slots=3)


def check_rows_that_lie_apart() -> None:
    stack = lora_checks.random_stack("cpu", torch.float32, 64, (32,))
    wide = torch.randn(5, 128)
    slots = torch.tensor([0, 1, -1, 2, 0], dtype=torch.int32)
    product = torch.zeros(5, 32)
    lora_checks.add(wide[:, :64], product, stack, Rows.in_blocks(slots, 5))
    wanted = lora_checks.wanted_delta(wide[:, :64], stack, slots)
    torch.testing.assert_close(product.double(), wanted, atol=1e-5, rtol=1e-5)


def check_products_that_lie_there() -> None:
    """By a library, whole, and by a kernel, in parts; and their gate."""
    stack = lora_checks.random_stack("cpu", torch.float32, 96, (24, 24))
    x, weight = torch.randn(20, 96), torch.randn(48, 96) / 10
    slots = lora_checks.random_slots("cpu", 20, 5)
    adapted = Adapted(stack, Rows.in_blocks(slots, 5))
    wanted = x.double() @ weight.double().T + lora_checks.wanted_delta(x, stack, slots)
    tile = SkinnyTile(16, 16, 16, 4, 2, parts=2)
    for is_library in (True, False):
        chosen = Library() if is_library else tile
        with patch.object(products, "tile_for", lambda *_, gated, chosen=chosen: chosen):
            with patch.object(linear_ops, "choose_for", lambda *_: tile):
                found = products.linear_in_parts(x, Weight(weight), None, adapted)
        assert found.dim() == (2 if is_library else 3)
        found = products.joined(found, torch.float32).double()
        assert (found - wanted).abs().max() < 1e-4 * wanted.abs().max()
    first, second = wanted.chunk(2, dim=-1)
    gated = products.gated_linear(x, Weight(weight), None, adapted).double()
    torch.testing.assert_close(gated, torch.nn.functional.silu(first) * second, atol=1e-4, rtol=1e-4)


def check_deltas_that_a_norm_adds() -> None:
    """A product by a library and one in parts; a norm behind either, whose other rows keep their bits."""
    stack = lora_checks.random_stack("cpu", torch.float32, 96, (40,))
    x, weight, residual = torch.randn(20, 96), torch.randn(40, 96) / 10, torch.randn(20, 40)
    slots, scale = lora_checks.random_slots("cpu", 20, 5), torch.randn(40)
    adapted = Adapted(stack, Rows.in_blocks(slots, 5))
    wanted = x.double() @ weight.double().T + lora_checks.wanted_delta(x, stack, slots) + residual.double()
    tile = SkinnyTile(16, 16, 16, 4, 2, parts=2)
    for chosen in (Library(), tile):
        with (
            patch.object(products, "tile_for", lambda *_, gated, chosen=chosen: chosen),
            patch.object(linear_ops, "choose_for", lambda *_: tile),
        ):
            product, deltas = products.linear_beside_adapters(x, Weight(weight), None, adapted)
        assert product.dim() == (2 if chosen is not tile else 3)
        assert deltas is not None
        deltas[0][slots < 0] = torch.nan  # undefined there
        total, without = residual.clone(), residual.clone()
        normed = triton_rows.add_adapted_rms_norm(product, total, scale, 1e-5, *deltas)
        others = triton_rows.add_rms_norm(product, without, scale, 1e-5)
        torch.testing.assert_close(total.double(), wanted, atol=1e-4, rtol=1e-4)
        norm = torch.nn.functional.rms_norm(wanted, (40,), scale.double(), 1e-5)
        torch.testing.assert_close(normed.double(), norm, atol=1e-4, rtol=1e-4)
        alone = slots < 0
        assert torch.equal(normed[alone], others[alone])
        assert torch.equal(total[alone], without[alone])


def check_fused_products() -> None:
    """One token with everything around it, more ranks than are taken at a time; a gate behind the product."""
    for flags in (
        {"norm": True},
        {"norm": True, "gated": True, "bias": True},
        {"bias": True, "residual": True},
    ):
        for max_rank in (16, 40) if ALL or "gated" in flags else (16,):
            lora_checks.check_fused(
                "cpu", torch.float32, (1, 48, 600), GemvTile(8, 256, 4), max_rank=max_rank, **flags
            )
    for num_tokens in (5, 40):
        lora_checks.check_fused(
            "cpu", torch.float32, (num_tokens, 40, 96), SkinnyTile(16, 32, 32, 4, 2), gated=True, bias=True
        )


def check_slots_of_gated_products() -> None:
    """As columns with which sums begin, or one after the other, as with many: ranks, either side of the
    tensor cores; one slot is broken."""
    turned, not_turned = SkinnyTile(16, 32, 32, 4, 2), SkinnyTile(16, 16, 32, 4, 2)
    cases = [((30, 24, 64), turned, 11, 40), ((20, 16, 64), not_turned, 5, 16)]
    if ALL:
        cases += [((40, 40, 96), turned, 16, 16), ((90, 24, 64), turned, 75, 16)]
    for most in (triton_skinny.MOST_SLOTS_AS_COLUMNS, 0):
        with patch.object(triton_skinny, "MOST_SLOTS_AS_COLUMNS", most):
            for shape, tile, num_slots, max_rank in cases:
                sizes = {"num_slots": num_slots, "max_rank": max_rank}
                lora_checks.check_broken_slot("cpu", torch.float32, shape, tile, **sizes)
                kinds = {"gated": True, "bias": True}
                lora_checks.check_fused("cpu", torch.float32, shape, tile, **kinds, **sizes)


def check_declarations() -> None:
    """What is changed is said to be changed, and nothing else is."""
    tests, ops = ("test_schema", "test_faketensor"), torch.ops.ostinato
    stack = lora_checks.random_stack("cpu", torch.float32, 32, (16, 8))
    slots = torch.tensor([0, 1, 0], dtype=torch.int32)
    rows, x = Rows.in_blocks(slots, 5), torch.randn(3, 32)
    shrunk = Operands.of(Adapted(stack, rows)).shrunk(x)
    shrunk.deltas()
    torch.library.opcheck(ops.lora_group.default, (slots, 5, 16, 3), test_utils=tests)
    grouped = (stack.ranks, rows.order, rows.blocks)
    torch.library.opcheck(ops.lora_shrink.default, (x, None, stack.a, 16, *grouped), test_utils=tests)
    expanded = (shrunk.sums, stack.b, 16, 24, *grouped, torch.randn(3, 24), False)
    torch.library.opcheck(ops.lora_expand.default, expanded, test_utils=tests)
    weight, one = torch.randn(24, 32), slots[:1]
    beside = (x, weight, None, True, *Operands.of(Adapted(stack, rows)))
    torch.library.opcheck(linear_ops.multiply_adapted._dispatched, beside, test_utils=tests)
    torch.library.opcheck(linear_ops.multiply_beside_adapters._dispatched, beside, test_utils=tests)
    added = (torch.randn(3, 24), torch.randn(3, 24), torch.randn(24), 1e-5, torch.randn(3, 24), slots)
    torch.library.opcheck(ops.add_adapted_rms_norm.default, added, test_utils=tests)
    with patch.object(linear_ops, "choose_for", lambda *_: SkinnyTile(16, 8, 16, 4, 2)):
        halves = lora_checks.random_stack("cpu", torch.float32, 32, (12, 12))
        gated = (x, weight, None, *Operands.of(Adapted(halves, rows)))
        torch.library.opcheck(ops.multiply_and_gate_adapted.default, gated, test_utils=tests)
    with patch.object(linear_ops, "choose_for", lambda *_: GemvTile(8, 32, 4)):
        added = Operands.of(Adapted(stack, Rows.in_blocks(one, 5)))
        operands = (x[:1], weight, None, None, 1e-5, False, None, torch.float32, *added)
        torch.library.opcheck(ops.project_few_adapted_tokens.default, operands, test_utils=tests)


if __name__ == "__main__":
    torch.set_num_threads(1)
    checks = [check_grouping, check_adding, check_fused_products, check_rows_that_lie_apart]
    checks += [check_products_that_lie_there, check_deltas_that_a_norm_adds, check_slots_of_gated_products]
    checks += [check_declarations]
    for check in checks[:2] if unchanged.is_brief() else checks:
        check()
        print(check.__name__, flush=True)
    print("all checks passed")
