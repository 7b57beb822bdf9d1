"""Checks of the CUDA kernels in the emulator, from their Python launch on, against float64."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from unittest.mock import patch

import torch
from torch import Tensor

from kernels import fused_checks
from kernels.cuda_emulator.emulated import Emulator
from ostinato.kernels.attention import cuda_decode
from ostinato.kernels.attention.choice import CudaDecodeTile
from ostinato.kernels.gpu import Gpu
from ostinato.kernels.linear import cuda_few_tokens, cuda_wide, few_tokens, scaled_rows
from ostinato.kernels.linear.cuda_few_tokens import FusedLayer
from ostinato.kernels.linear.tiles import CudaGemvTile, FragmentsTile, MatrixShape, StreamedTile, WideTile
from ostinato.kernels.lora import Rows
from ostinato.kernels.lora.low_rank import Operands, Shrunk
from ostinato.kernels.norms import empty_scaled

CPU = torch.device("cpu")
H200_MULTIPROCESSORS = 132


def random_bf16(*shape: int, scale: float = 1.0) -> Tensor:
    """Of torch's present seed."""
    return (torch.randn(shape) * scale).bfloat16()


@contextmanager
def _new_tensors_full_of_nan() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@dataclass(frozen=True)
class Form:
    """What a layer does beside the product, and the type of the results."""

    norm: bool = False
    bias: bool = False
    residual: bool = False
    adapted: bool = False
    dtype: torch.dtype = torch.bfloat16


def emulated_few_tokens(emulator: Emulator) -> AbstractContextManager[object]:
    """Inside, the kernels of few tokens run in the emulator."""
    return patch.object(cuda_few_tokens, "cuda_kernel", emulator.kernel)


def check_fragments(
    emulator: Emulator, shape: MatrixShape, tile: FragmentsTile, form: Form, num_tokens: int
) -> None:
    """A layer by `few_tokens.cu`, its weights resident."""
    assert tile.fits(shape)
    with emulated_few_tokens(emulator):
        _check_layer(cuda_few_tokens.launch_few_tokens, shape, tile, form, num_tokens, random_shrunk)


def check_gemv(emulator: Emulator, shape: MatrixShape, tile: CudaGemvTile, form: Form) -> None:
    """A layer by `gemv.cu`."""
    assert tile.fits(shape)
    with patch.object(cuda_few_tokens, "cuda_kernel", emulator.kernel):
        _check_layer(cuda_few_tokens.launch_gemv, shape, tile, form, num_tokens=1)


def check_streamed(
    emulator: Emulator, shape: MatrixShape, tile: StreamedTile, form: Form, num_tokens: int
) -> None:
    """A layer by `few_tokens.cu`, its weights streamed."""
    assert tile.fits(shape)
    with patch.object(cuda_few_tokens, "cuda_kernel", emulator.kernel):
        _check_layer(cuda_few_tokens.launch_few_tokens, shape, tile, form, num_tokens, random_shrunk)


def check_wide(emulator: Emulator, shape: MatrixShape, tile: WideTile, form: Form, num_tokens: int) -> None:
    """A layer by `wide.cu`."""
    assert tile.fits(shape)
    with patch.object(cuda_wide, "cuda_kernel", emulator.kernel):
        _check_layer(_launch_wide, shape, tile, form, num_tokens, random_shrunk)


def check_scaled(
    emulator: Emulator,
    shape: MatrixShape,
    tile: WideTile,
    num_tokens: int,
    *,
    bias: bool,
    adapted: bool = False,
) -> None:
    """The two layers around a half-done norm by `wide.cu`: behind it, and, if not gated, before it."""
    assert tile.fits(shape)
    torch.manual_seed(num_tokens)
    x = random_bf16(num_tokens, shape.in_features, scale=3.0)
    weight = random_bf16(shape.out_features * (2 if shape.gated else 1), shape.in_features, scale=0.05)
    biases = random_bf16(weight.size(0)) if bias else None
    before, behind = random_bf16(shape.in_features), random_bf16(shape.out_features)
    exact_bias = None if biases is None else biases.double()
    begun = scaled_rows.scale(x, before)
    out = torch.full((num_tokens + 1, shape.out_features), 7.0).bfloat16()
    with patch.object(cuda_wide, "cuda_kernel", emulator.kernel):
        launch = cuda_wide.launch_wide
        shrunk, added = random_shrunk(num_tokens, weight.size(0))
        more = {"shrunk": shrunk if adapted else None}
        launch(begun.scaled, weight, biases, out[:num_tokens], tile, squares=begun.squares, eps=1e-5, **more)
        factor = (x.double().square().mean(1, keepdim=True) + 1e-5).rsqrt()
        operands = (x.double() * factor * before.double(), weight.double(), exact_bias)
        wanted = _with_added(*operands, added.double() * factor if adapted else None, gated=shape.gated)
        assert (out[:num_tokens].double() - wanted).norm() < 6e-3 * wanted.norm()
        assert (out[num_tokens] == 7.0).all(), "wrote behind the last token"
        if shape.gated or tile.rows % 64:
            return
        rows = random_bf16(num_tokens, shape.out_features)
        sums = rows.clone()
        scaled, squares = (torch.full_like(tensor, float("nan")) for tensor in empty_scaled(rows))
        launch(x, weight, biases, sums, tile, norm_weight=behind, scaled=scaled, new_squares=squares, **more)
    operands = (x.double(), weight.double(), exact_bias)
    wanted = rows.double() + _with_added(*operands, added.double() if adapted else None)
    assert (sums.double() - wanted).norm() < 6e-3 * wanted.norm()
    assert (scaled.double() - sums.double() * behind.double()).norm() < 6e-3 * scaled.double().norm()
    torch.testing.assert_close(squares, scaled_rows.scale(sums, behind).squares)


def _launch_wide(layer: FusedLayer, out: Tensor, tile: WideTile, shrunk: Shrunk | None) -> None:
    assert layer.norm_weight is layer.residual is None
    cuda_wide.launch_wide(layer.x, layer.weight, layer.bias, out, tile, shrunk=shrunk)


def _with_added(
    x: Tensor, weight: Tensor, bias: Tensor | None, added: Tensor | None, *, gated: bool = False
) -> Tensor:
    """`few_tokens.reference`; what adapters add as so many more columns of weights, one for each token."""
    if added is not None:
        weight = torch.cat([weight, added.T], dim=1)
        x = torch.cat([x, torch.eye(x.size(0), dtype=x.dtype)], dim=1)
    return few_tokens.reference(x, weight, bias, gated=gated)


def random_deltas(num_tokens: int, width: int) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """As a launch takes them, NaN where a token has no adapter; and what is to be added."""
    slots = torch.randint(-1, 2, (num_tokens,), dtype=torch.int32)
    deltas = torch.randn(num_tokens, width)
    is_added = (slots >= 0)[:, None]
    return (torch.where(is_added, deltas, torch.nan), slots), torch.where(is_added, deltas, 0.0)


def in_blocks(slots: Tensor, num_slots: int, size: int = 16) -> Rows:
    """As kernels group tokens; not all blocks are there."""
    order = [token for slot in range(num_slots) for token in (slots == slot).nonzero().flatten().tolist()]
    blocks, first = [], 0
    for slot in range(num_slots):
        count = int((slots == slot).sum())
        blocks += [(slot, first + at, first + min(at + size, count)) for at in range(0, count, size)]
        first += count
    blocks += [(-1, 0, 0)] * 2
    found = sorted({slot for slot, _, _ in blocks if slot >= 0})
    table = [*zip(*blocks, strict=True), found + [-1] * (len(blocks) - len(found)), [0] * len(blocks)]
    order += [-7] * (len(slots) - len(order))
    return Rows(slots, torch.tensor(order, dtype=torch.int32), torch.tensor(table, dtype=torch.int32))


def random_shrunk(num_tokens: int, width: int, *, room: int = 48) -> tuple[Shrunk, Tensor]:
    """As `random_deltas`, of two parts; NaN where nobody need look. Slot 1 is broken, and nobody has it."""
    num_slots = 7
    slots = torch.randint(-1, num_slots, (num_tokens,), dtype=torch.int32)
    slots[slots == 1] = 0
    ranks = torch.randint(1, room + 1, (num_slots,), dtype=torch.int32)
    parts = (width // 2, width - width // 2)
    b = torch.randn(num_slots, width, room).bfloat16() / 4
    is_rank = torch.arange(room) < ranks[:, None]
    b = torch.where(is_rank[:, None, :], b, 0)
    b[1] = torch.inf
    is_left = torch.arange(room) < (ranks[:, None] + 15) // 16 * 16
    is_left = is_left[slots.long()] & (slots >= 0)[:, None]
    left = torch.randn(num_tokens, 2, room).bfloat16().float()
    added = [
        torch.einsum("tr,tor->to", torch.where(is_left, left[:, number], 0).double(), of_part.double())
        for number, of_part in enumerate(b[slots.long().clamp(min=0)].split(parts, dim=1))
    ]
    added = torch.where((slots >= 0)[:, None], torch.cat(added, dim=1), 0.0).float()
    left = torch.where(is_left[:, None, :], left, torch.nan).view(1, num_tokens, 2 * room)
    rows = in_blocks(slots, num_slots)
    assert rows.order is not None
    assert rows.blocks is not None
    rows.blocks[4, 0] = 1  # as the kernel before says it
    return Shrunk(left, Operands(b, b, ranks, slots, rows.order, rows.blocks, parts[0], width)), added


def _check_layer(
    launch: Callable[..., None],
    shape: MatrixShape,
    tile: FragmentsTile | CudaGemvTile | StreamedTile | WideTile,
    form: Form,
    num_tokens: int,
    random_added: Callable[[int, int], tuple[object, Tensor]] = random_deltas,
) -> None:
    """A layer, and that nothing is written behind its last token."""
    torch.manual_seed(num_tokens)
    width = shape.in_features
    x = random_bf16(num_tokens, width, scale=3.0)
    weight = random_bf16(shape.out_features * (2 if shape.gated else 1), width, scale=width**-0.5)
    bias = random_bf16(weight.size(0)) if form.bias else None
    norm_weight = random_bf16(width) if form.norm else None
    residual = random_bf16(num_tokens, shape.out_features) if form.residual else None
    out = torch.full((num_tokens + 1, shape.out_features), 7.0, dtype=form.dtype)
    out[:num_tokens] = float("nan")
    given, added = random_added(num_tokens, weight.size(0))
    layer = FusedLayer(x, weight, bias, norm_weight, 1e-5, shape.gated, residual, form.dtype)
    launch(layer, out[:num_tokens], tile, given if form.adapted else None)
    x, weight, bias, norm_weight, residual = (
        None if tensor is None else tensor.double() for tensor in (x, weight, bias, norm_weight, residual)
    )
    factor = (x.square().mean(1, keepdim=True) + 1e-5).rsqrt()
    normed = x if norm_weight is None else x * factor * norm_weight
    added = added.double() * factor if form.norm else added.double()
    wanted = _with_added(normed, weight, bias, added if form.adapted else None, gated=shape.gated)
    wanted = wanted if residual is None else wanted + residual
    assert (out[:num_tokens].double() - wanted).norm() < 6e-3 * wanted.norm()
    assert (out[num_tokens] == 7.0).all(), "wrote behind the last token"


@contextmanager
def emulated_attention(emulator: Emulator, tile: CudaDecodeTile, multiprocessors: int) -> Iterator[None]:
    """Inside, single tokens are attended to in the emulator: with this tile, on a GPU of this size."""
    with (
        patch.multiple(
            cuda_decode,
            cuda_kernel=emulator.kernel,
            is_supported=lambda device: True,
            cuda_decode_tile=lambda *batch: tile,
            gpu_of=lambda device: Gpu((9, 0), multiprocessors),
            _counters_of_caches={},
        ),
        _new_tensors_full_of_nan(),
    ):
        yield


def check_attention(
    emulator: Emulator,
    tile: CudaDecodeTile,
    heads: fused_checks.Heads,
    lengths: list[int],
    *,
    multiprocessors: int = H200_MULTIPROCESSORS,
    norm: bool = True,
    window: int | None = None,
    dtype: torch.dtype = torch.bfloat16,
    parts: int = 1,
) -> None:
    """From QKV rows to attention and caches, with padded tokens and NaN wherever nothing may be read."""
    requests = [(length, 1) for length in lengths]
    with emulated_attention(emulator, tile, multiprocessors):
        fused_checks.check_attend_qkv(
            CPU, dtype, requests, heads, norm=norm, max_query_len=1, window=window, parts=parts
        )
        assert cuda_decode._counters_of_caches
        assert not any(counters.any() for _, counters in cuda_decode._counters_of_caches.values())


def check_few_tokens(
    emulator: Emulator,
    tile: CudaDecodeTile,
    heads: fused_checks.Heads,
    requests: list[tuple[int, int]],
    places: int,
    *,
    multiprocessors: int = H200_MULTIPROCESSORS,
    norm: bool = True,
    window: int | None = None,
    dtype: torch.dtype = torch.bfloat16,
    parts: int = 1,
) -> None:
    """The same of requests of (context, tokens), with places for so many tokens each."""
    with emulated_attention(emulator, tile, multiprocessors):
        fused_checks.check_equal_places(
            CPU, dtype, requests, places, heads, norm=norm, window=window, parts=parts
        )
        assert cuda_decode._counters_of_caches
        assert not any(counters.any() for _, counters in cuda_decode._counters_of_caches.values())
