# mypy: allow-untyped-defs
# (Triton gives a meaning of its own to the annotations of a kernel's parameters.)
"""A matrix times some dozens of tokens: the weights stream by once, the tensor cores take all tokens at once.

A CTA takes a block of the matrix's rows and a block of the tokens; the larger of the two lies along the
longer side of the tensor cores. With `parts` > 1 the columns are shared too:

    columns      | part 0 | part 1 | ...      each its own product, float32 [parts, T, out]

and who reads the result adds them, in order, so that the same input always gives the same bits. `gated` is
silu(first half of the rows) * second half; `adapted`: of the products and what adapters, of two parts, add to
them.

Adapters are added when the sums are complete, slot by slot; or, `as_columns`, the sums begin with them:

    columns      | slot 3 | slot 0 | slot 7 | slot 5 |      16 ranks each, as if the matrix had so many more

What a token has in the columns of others is zero.
"""

import triton
import triton.language as tl
from torch import Tensor

from .. import dependent_launch
from ..dependent_launch import wait_for_previous
from ..host_sizes import cdiv
from ..lora.low_rank import Shrunk
from .tiles import SkinnyTile

MOST_SLOTS_AS_COLUMNS = 16
"""`_count_of_slots` counts so many; with more adapters in a batch, one after the other is faster."""


@triton.jit
def _load_tile(places, mask, even: tl.constexpr):
    """Loads `places`; zeros where `mask` is false, which it never is in an even division of work."""
    if even:
        return tl.load(places)
    return tl.load(places, mask=mask, other=0.0)


@triton.jit
def _multiply(w, v, acc, turned: tl.constexpr):
    """acc + v [tokens, columns] times w [rows, columns], or that turned round."""
    if turned:
        acc = tl.dot(w, tl.trans(v), acc, input_precision="ieee")
    else:
        acc = tl.dot(v, tl.trans(w), acc, input_precision="ieee")
    return acc


@triton.jit
def _slot_of(blocks, block, num_blocks):
    """Returns the slot of a block of tokens; -1 if there is none, or if the block before has the same."""
    slot = tl.load(blocks + tl.minimum(block, num_blocks - 1))
    before = tl.load(blocks + tl.maximum(tl.minimum(block, num_blocks) - 1, 0))
    return tl.where((block < num_blocks) & ((block == 0) | (slot != before)), slot, -1)


@triton.jit
def _second_matrix(b, ranks, slot, n, in_rows, start, of_matrix: tl.constexpr, room: tl.constexpr):
    """Rows n and 16 ranks of a slot's; zeros if it has none there."""
    slot = tl.maximum(slot, 0)
    has_ranks = (start == 0) | (start < tl.load(ranks + slot))
    rows_of_b = b + (slot.to(tl.int64) * of_matrix + n)[:, None] * room + start + tl.arange(0, 16)[None, :]
    return tl.load(rows_of_b, mask=(in_rows & has_ranks)[:, None], other=0.0)


@triton.jit
def _with_slot(acc, v, w, slot, has_slot):
    """A slot's matrix is multiplied with all tokens, and added to its own: others keep their bits, whatever a
    broken adapter makes of them."""
    added = tl.dot(v, tl.trans(w), input_precision="ieee")
    return tl.where(((has_slot == slot) & (slot >= 0))[:, None], acc + added, acc)


@triton.jit
def _with_adapters(
    acc,
    left,
    b,
    ranks,
    blocks,
    num_blocks,
    num_tokens,
    token,
    has_slot,
    n,
    in_rows,
    part: tl.constexpr,
    of_matrix: tl.constexpr,
    room: tl.constexpr,
    splits: tl.constexpr,
):
    """acc [tokens, rows] and what adapters make of what is left of the tokens; rows n are of `part`.

    Four slots at a time: each waits for its matrix.
    """
    width: tl.constexpr = 2 * room
    for start in range(0, room, 16):
        v = tl.zeros([token.shape[0], 16], tl.float32)
        has_left = (has_slot >= 0) & ((start == 0) | (start < tl.load(ranks + tl.maximum(has_slot, 0))))
        for split in tl.static_range(splits):
            of_token = (split * num_tokens + token)[:, None] * width + part * room + start
            v += tl.load(left + of_token + tl.arange(0, 16)[None, :], mask=has_left[:, None], other=0.0)
        v = v.to(b.dtype.element_ty)
        for block in range(0, num_blocks, 4):
            slot = _slot_of(blocks, block, num_blocks)
            slot_1 = _slot_of(blocks, block + 1, num_blocks)
            slot_2 = _slot_of(blocks, block + 2, num_blocks)
            slot_3 = _slot_of(blocks, block + 3, num_blocks)
            if tl.maximum(tl.maximum(slot, slot_1), tl.maximum(slot_2, slot_3)) >= 0:
                w = _second_matrix(b, ranks, slot, n, in_rows, start, of_matrix, room)
                w_1 = _second_matrix(b, ranks, slot_1, n, in_rows, start, of_matrix, room)
                w_2 = _second_matrix(b, ranks, slot_2, n, in_rows, start, of_matrix, room)
                w_3 = _second_matrix(b, ranks, slot_3, n, in_rows, start, of_matrix, room)
                acc = _with_slot(acc, v, w, slot, has_slot)
                acc = _with_slot(acc, v, w_1, slot_1, has_slot)
                acc = _with_slot(acc, v, w_2, slot_2, has_slot)
                acc = _with_slot(acc, v, w_3, slot_3, has_slot)
    return acc


@triton.jit
def _count_of_slots(blocks, num_blocks):
    """Counts the slots that tokens have: at most 16, more are never columns."""
    place = tl.arange(0, 16)
    slot = tl.load(blocks + 3 * num_blocks + place, mask=place < num_blocks, other=-1)
    return tl.sum((slot >= 0).to(tl.int32), 0)


@triton.jit
def _columns_of_slots(
    b, ranks, blocks, num_blocks, first, start, n, in_rows, of_matrix: tl.constexpr, room: tl.constexpr
):
    """Rows n and 16 ranks of four slots side by side; the slot of each column; which columns are broken.

    In place of what is infinite or NaN there are zeros: nobody else's sums may become that.
    """
    c = tl.arange(0, 64)
    place = first + c // 16
    slot = tl.load(blocks + 3 * num_blocks + place, mask=place < num_blocks, other=-1)
    rank = tl.load(ranks + tl.maximum(slot, 0))
    slot = tl.where((start == 0) | (start < rank), slot, -1)
    rows_of_b = tl.maximum(slot, 0).to(tl.int64)[None, :] * of_matrix + n[:, None]
    places = b + rows_of_b * room + start + (c % 16)[None, :]
    w = tl.load(places, mask=in_rows[:, None] & (slot >= 0)[None, :], other=0.0)
    is_finite = tl.abs(w.to(tl.float32)) < float("inf")
    return tl.where(is_finite, w, 0.0), slot, tl.max(tl.where(is_finite, 0, 1), 0)


@triton.jit
def _left_in_columns(
    left,
    num_tokens,
    token,
    has_slot,
    slot,
    is_broken,
    start,
    part: tl.constexpr,
    room: tl.constexpr,
    splits: tl.constexpr,
):
    """Places each token's ranks into the columns of its own slot; NaN for a broken one."""
    is_own = (has_slot[:, None] == slot[None, :]) & (slot >= 0)[None, :]
    v = tl.zeros([token.shape[0], 64], tl.float32)
    for split in tl.static_range(splits):
        of_token = (split * num_tokens + token)[:, None] * (2 * room) + part * room + start
        v += tl.load(left + of_token + (tl.arange(0, 64) % 16)[None, :], mask=is_own, other=0.0)
    return tl.where(is_own & (is_broken > 0)[None, :], float("nan"), v)


@triton.jit(do_not_specialize=("num_tokens", "num_blocks"))
def _skinny(
    x,
    weight,
    bias,
    out,
    left,
    b,
    ranks,
    slots,
    blocks,
    num_blocks,
    num_tokens,
    out_features: tl.constexpr,
    in_features: tl.constexpr,
    gated: tl.constexpr,
    has_bias: tl.constexpr,
    tokens: tl.constexpr,
    rows: tl.constexpr,
    block: tl.constexpr,
    parts: tl.constexpr,
    adapted: tl.constexpr,
    room: tl.constexpr,
    splits: tl.constexpr,
    as_columns: tl.constexpr,
    dependent: tl.constexpr,
):
    turned: tl.constexpr = rows > tokens
    step: tl.constexpr = parts * block
    columns: tl.constexpr = (in_features + step - 1) // step * block
    even: tl.constexpr = out_features % rows == 0 and in_features % (parts * columns) == 0
    part = tl.program_id(2)
    first_row = tl.program_id(1).to(tl.int64) * rows
    n = first_row + tl.arange(0, rows)
    in_rows = n < out_features
    second = weight + out_features * in_features
    token = tl.program_id(0) * tokens + tl.arange(0, tokens)
    # Surplus tokens are masked: all CTAs reading one row in their place would queue up for it.
    real = (token < num_tokens)[:, None]
    place = n[:, None] * in_features + part * columns
    source = token.to(tl.int64)[:, None] * in_features + part * columns
    limit = in_features - part * columns
    of_matrix: tl.constexpr = (2 if gated else 1) * out_features
    up = n + out_features
    if as_columns:
        has_slot = tl.load(slots + token, mask=token < num_tokens, other=-1)
        count = _count_of_slots(blocks, num_blocks)
        w, slot, broken = _columns_of_slots(b, ranks, blocks, num_blocks, 0, 0, n, in_rows, of_matrix, room)
        w_up, _, broken_up = _columns_of_slots(
            b, ranks, blocks, num_blocks, 0, 0, up, in_rows, of_matrix, room
        )
    wait_for_previous(dependent)

    acc = tl.zeros([rows, tokens] if turned else [tokens, rows], tl.float32)
    acc_up = tl.zeros([rows, tokens] if turned else [tokens, rows], tl.float32)
    if as_columns:
        if count > 0:
            v = _left_in_columns(left, num_tokens, token, has_slot, slot, broken, 0, 0, room, splits)
            v_up = _left_in_columns(left, num_tokens, token, has_slot, slot, broken_up, 0, 1, room, splits)
            acc = _multiply(w, v.to(w.dtype), acc, turned)
            acc_up = _multiply(w_up, v_up.to(w.dtype), acc_up, turned)
        fours = (count + 3) // 4
        for four in range(1, fours * (room // 16)):
            first, rank = four % fours * 4, four // fours * 16
            w, slot, broken = _columns_of_slots(
                b, ranks, blocks, num_blocks, first, rank, n, in_rows, of_matrix, room
            )
            v = _left_in_columns(left, num_tokens, token, has_slot, slot, broken, rank, 0, room, splits)
            acc = _multiply(w, v.to(w.dtype), acc, turned)
            w, slot, broken = _columns_of_slots(
                b, ranks, blocks, num_blocks, first, rank, up, in_rows, of_matrix, room
            )
            v = _left_in_columns(left, num_tokens, token, has_slot, slot, broken, rank, 1, room, splits)
            acc_up = _multiply(w, v.to(w.dtype), acc_up, turned)
    for start in range(0, columns, block):
        k = start + tl.arange(0, block)[None, :]
        known, inside = real, in_rows[:, None] & (k < limit)
        if not even:
            known = known & (k < limit)
        v = tl.load(x + source + k, mask=known, other=0.0)
        acc = _multiply(_load_tile(weight + place + k, inside, even), v, acc, turned)
        if gated:
            acc_up = _multiply(_load_tile(second + place + k, inside, even), v, acc_up, turned)

    if turned:
        acc, acc_up = tl.trans(acc), tl.trans(acc_up)
    if adapted and not as_columns:
        has_slot = tl.load(slots + token, mask=token < num_tokens, other=-1)
        acc = _with_adapters(
            acc,
            left,
            b,
            ranks,
            blocks,
            num_blocks,
            num_tokens,
            token,
            has_slot,
            n,
            in_rows,
            0,
            of_matrix,
            room,
            splits,
        )
        if gated:
            acc_up = _with_adapters(
                acc_up,
                left,
                b,
                ranks,
                blocks,
                num_blocks,
                num_tokens,
                token,
                has_slot,
                up,
                in_rows,
                1,
                of_matrix,
                room,
                splits,
            )
    if has_bias:
        is_added = in_rows
        if parts > 1:
            is_added = n < out_features * (part == 0)  # parts are added, so one of them brings the bias
        acc += tl.load(bias + n, mask=is_added, other=0.0).to(tl.float32)[None, :]
        if gated:
            acc_up += tl.load(bias + out_features + n, mask=in_rows, other=0.0).to(tl.float32)[None, :]
    y = acc
    if gated:
        y = acc / (1.0 + tl.exp(-acc)) * acc_up
    target = (part * num_tokens + token).to(tl.int64)[:, None] * out_features + n[None, :]
    tl.store(out + target, y.to(out.dtype.element_ty), real & in_rows[None, :])


def launch_skinny(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    gated: bool,
    out: Tensor,
    tile: SkinnyTile,
    shrunk: Shrunk | None = None,
) -> None:
    """Queues the kernel; operands are dense. `out` has split-K partials if the tile has parts."""
    assert shrunk is None or (gated and shrunk.of.second == out.size(-1)), (
        "adapters add to the halves of a gate"
    )
    of = shrunk and shrunk.of
    num_tokens, in_features = x.shape
    out_features = out.size(-1)
    grid = (cdiv(num_tokens, tile.tokens), cdiv(out_features, tile.rows), tile.parts)
    _skinny[grid](
        x,
        weight,
        x if bias is None else bias,
        out,
        *((shrunk.sums, of.b, of.ranks, of.slots, of.blocks) if shrunk and of else (x,) * 5),
        of.blocks.size(1) if of else 0,
        num_tokens,
        out_features=out_features,
        in_features=in_features,
        gated=gated,
        has_bias=bias is not None,
        tokens=tile.tokens,
        rows=tile.rows,
        block=tile.block,
        parts=tile.parts,
        adapted=shrunk is not None,
        as_columns=of is not None and of.b.size(0) <= MOST_SLOTS_AS_COLUMNS,
        room=of.b.size(2) if of else 0,
        splits=shrunk.sums.size(0) if shrunk else 0,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        enable_fp_fusion=True,
        **dependent_launch.options(x.device),
    )
