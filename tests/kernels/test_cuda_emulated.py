"""The CUDA kernels and what launches them, without a GPU: right in the emulator."""

import random
from dataclasses import replace

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from kernels.cuda_emulator.emulated import MAY_SKIP, MOST_SHARED_BYTES, Emulator
from kernels.emulated_checks import (
    H200_MULTIPROCESSORS,
    Form,
    check_attention,
    check_fragments,
    check_gemv,
    check_streamed,
    emulated_attention,
    emulated_few_tokens,
    random_bf16,
)
from kernels.fast_cases import slow_but_for
from kernels.paged_cases import make_case
from ostinato.kernels.attention import HeadPreparation, gpu_ops
from ostinato.kernels.attention.choice import CudaDecodeTile
from ostinato.kernels.linear.cuda_few_tokens import FusedLayer, launch_few_tokens
from ostinato.kernels.linear.tiles import CudaGemvTile, FragmentsTile, MatrixShape, StreamedTile

pytestmark = pytest.mark.skipif(MAY_SKIP, reason="needs g++")


@pytest.fixture(scope="module")
def emulator(tmp_path_factory):
    return Emulator(tmp_path_factory.mktemp("kernels"))


PLAIN = MatrixShape(64, 512), FragmentsTile(rows=32, slices=1, num_warps=8, held=4, registers=160)
STAGED = MatrixShape(16, 256), FragmentsTile(rows=8, slices=1, num_warps=4, held=0, registers=128)
PAIRS = MatrixShape(64, 512), FragmentsTile(rows=32, slices=2, num_warps=8, held=2, registers=160)
FOURS = MatrixShape(64, 1024), FragmentsTile(rows=32, slices=4, num_warps=4, held=0, registers=128)
EIGHTS = MatrixShape(64, 1024), FragmentsTile(rows=64, slices=8, num_warps=4, held=8, registers=200)
GATED = MatrixShape(24, 256, gated=True), FragmentsTile(12, slices=1, num_warps=8, held=3, registers=160)
GATED_PAIRS = (
    MatrixShape(48, 512, gated=True),
    FragmentsTile(24, slices=2, num_warps=8, held=3, registers=160),
)


LAYERS = {
    "8 tokens": (PLAIN, Form(norm=True), (1, 2, 7, 8)),
    "16 tokens": (PLAIN, Form(norm=True), (9, 16)),
    "all in shared memory": (STAGED, Form(bias=True, residual=True), (3, 8)),
    "float32": (STAGED, Form(norm=True, dtype=torch.float32), (15,)),
    "two programs share": (PAIRS, Form(norm=True, bias=True), (1, 7)),
    "two programs share, many tokens": (PAIRS, Form(norm=True, residual=True), (11, 16)),
    "four programs share": (FOURS, Form(residual=True), (13,)),
    "eight programs share": (EIGHTS, Form(norm=True, bias=True, residual=True), (15,)),
    "gated": (GATED, Form(norm=True), (8,)),
    "gated, two programs share": (GATED_PAIRS, Form(norm=True, residual=True), (3,)),
    "gated, with all else": (
        GATED_PAIRS,
        Form(norm=True, bias=True, residual=True, dtype=torch.float32),
        (12,),
    ),
    "adapters": (PAIRS, Form(norm=True, adapted=True), (7, 16)),
    "adapters, gated": (GATED, Form(norm=True, bias=True, residual=True, adapted=True), (8,)),
}


@pytest.mark.parametrize(
    "name",
    slow_but_for(
        LAYERS,
        *("8 tokens", "float32", "four programs share", "eight programs share", "gated, with all else"),
        *("adapters", "adapters, gated"),
    ),
)
def test_a_linear_layer_is_right(emulator, name):
    matrix, form, tokens = LAYERS[name]
    for num_tokens in tokens:
        check_fragments(emulator, *matrix, form, num_tokens)


SINGLES = {
    "one row a warp": (MatrixShape(8, 1024), CudaGemvTile(1, 4, 96), Form(residual=True)),
    "four rows": (MatrixShape(64, 256), CudaGemvTile(4, 8, 64), Form(norm=True)),
    "three columns": (MatrixShape(12, 768), CudaGemvTile(3, 2, 128), Form(bias=True, dtype=torch.float32)),
    "gated": (MatrixShape(24, 512, gated=True), CudaGemvTile(3, 4, 128), Form(norm=True)),
    "gated, with all else": (
        MatrixShape(10, 256, gated=True),
        CudaGemvTile(5, 1, 128),
        Form(norm=True, bias=True, residual=True),
    ),
    "adapters": (MatrixShape(12, 256), CudaGemvTile(3, 2, 128), Form(residual=True, adapted=True)),
    "adapters, gated": (
        MatrixShape(10, 256, gated=True),
        CudaGemvTile(5, 1, 128),
        Form(norm=True, bias=True, adapted=True),
    ),
}


@pytest.mark.parametrize(
    "name", slow_but_for(SINGLES, "four rows", "three columns", "gated, with all else", "adapters, gated")
)
def test_a_linear_layer_of_one_token_is_right(emulator, name):
    check_gemv(emulator, *SINGLES[name])


STREAMED = {
    "one warp for a row": ((64, 512), (32, 1, 1, 128, 3, 2), Form(bias=True, residual=True), (1, 5, 8)),
    "warps share": ((64, 512), (16, 1, 2, 64, 2, 2), Form(norm=True, dtype=torch.float32), (9, 16)),
    "as far ahead as there are columns": ((32, 1024), (16, 1, 4, 128, 3, 8), Form(norm=True), (8,)),
    "programs share": ((64, 1024), (32, 4, 1, 64, 3, 3), Form(residual=True), (8,)),
    "short chunks": ((64, 2560), (64, 8, 1, 64, 5, 8), Form(norm=True, residual=True), (8, 13)),
    "programs and warps share": ((64, 1024), (64, 8, 2, 64, 2, 2), Form(norm=True, bias=True), (2, 15)),
    "gated": ((48, 512, True), (24, 1, 1, 128, 3, 4), Form(norm=True, bias=True), (16,)),
    "gated, warps share": ((32, 1024, True), (16, 1, 4, 64, 2, 2), Form(norm=True, residual=True), (11,)),
    "gated, with all else": (
        (64, 1024, True),
        (32, 2, 2, 128, 2, 3),
        Form(norm=True, bias=True, residual=True, dtype=torch.float32),
        (13,),
    ),
    "adapters": ((64, 1024), (64, 8, 2, 64, 2, 2), Form(residual=True, adapted=True), (8, 15)),
    "adapters, gated": ((32, 512, True), (16, 1, 2, 64, 2, 2), Form(norm=True, adapted=True), (7,)),
}


@pytest.mark.parametrize(
    "name",
    slow_but_for(
        STREAMED,
        *("one warp for a row", "warps share", "as far ahead as there are columns", "short chunks"),
        *("programs share", "gated, with all else", "adapters", "adapters, gated"),
    ),
)
def test_a_linear_layer_that_streams_is_right(emulator, name):
    shape, tile, form, tokens = STREAMED[name]
    for num_tokens in tokens:
        check_streamed(emulator, MatrixShape(*shape), StreamedTile(*tile, registers=64), form, num_tokens)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_random_linear_layers_that_stream(emulator):
    chance, checked = random.Random(0), 0
    while checked < 60:
        gated, slices, shares = chance.random() < 0.4, chance.choice([1, 2, 4, 8]), chance.choice([1, 2, 4])
        rows = (8 if gated else 16) * chance.randint(1, 4)
        chunk, slots, ahead = chance.choice([64, 128]), chance.randint(2, 4), chance.randint(1, 12)
        tile = StreamedTile(rows, slices, shares, chunk, slots, ahead, registers=64)
        columns = slices * shares * chunk * chance.randint(1, 3)
        shape = MatrixShape(rows * chance.randint(1, 3), columns, gated)
        dtype = chance.choice([torch.bfloat16, torch.float32])
        form = Form(chance.random() < 0.5, chance.random() < 0.5, chance.random() < 0.5, dtype)
        num_tokens = chance.randint(1, 16)
        needed = tile.shared_bytes(shape, num_tokens, norm=form.norm)
        if tile.fits(shape) and needed <= MOST_SHARED_BYTES:
            check_streamed(emulator, shape, tile, form, num_tokens)
            checked += 1


def test_equal_tokens_give_equal_bits_wherever_they_are(emulator):
    torch.manual_seed(0)
    shape, tile = PAIRS
    weight, norm_weight = random_bf16(shape.out_features, shape.in_features), random_bf16(shape.in_features)
    x, residual = (
        random_bf16(1, n).expand(16, -1).contiguous() for n in (shape.in_features, shape.out_features)
    )
    out = torch.empty(16, shape.out_features, dtype=torch.bfloat16)
    with emulated_few_tokens(emulator):
        launch_few_tokens(
            FusedLayer(x, weight, None, norm_weight, 1e-5, False, residual, out.dtype), out, tile
        )
    assert (out == out[0]).all()


def test_more_tokens_than_a_kernel_is_compiled_for_are_refused(emulator):
    """They would be left out without a word."""
    with pytest.raises(AssertionError):
        check_fragments(emulator, *PLAIN, Form(), 17)
    with pytest.raises(AssertionError):
        check_streamed(emulator, MatrixShape(64, 512), StreamedTile(32, 1, 1, 128, 3, 2, 64), Form(), 17)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_random_linear_layers(emulator):
    chance = random.Random(0)
    for _ in range(120):
        shape, tile = chance.choice([PLAIN, STAGED, PAIRS, FOURS, EIGHTS, GATED, GATED_PAIRS])
        tile = replace(tile, held=chance.randint(0, tile.rows * (2 if shape.gated else 1) // 8))
        dtype = chance.choice([torch.bfloat16, torch.float32])
        form = Form(chance.random() < 0.5, chance.random() < 0.5, chance.random() < 0.5, dtype)
        check_fragments(emulator, shape, tile, form, chance.randint(1, 16))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_random_linear_layers_of_one_token(emulator):
    chance = random.Random(0)
    for _ in range(30):
        rows, num_warps, gated = chance.randint(1, 6), chance.choice([1, 2, 4, 8]), chance.random() < 0.4
        shape = MatrixShape(rows * num_warps * chance.randint(1, 5), 256 * chance.randint(1, 6), gated)
        tile = CudaGemvTile(rows, num_warps, registers=255)
        dtype = chance.choice([torch.bfloat16, torch.float32])
        form = Form(chance.random() < 0.5, chance.random() < 0.5, chance.random() < 0.5, dtype)
        if tile.fits(shape):
            check_gemv(emulator, shape, tile, form)


# Warps, slots and programs of the tiles that `decode_tiles` has, and smaller ones.
FEW = CudaDecodeTile(8, 4, 1, chunk_tiles=4, max_chunks=8)
SOME = CudaDecodeTile(8, 3, 2, chunk_tiles=2, max_chunks=3)
MANY = CudaDecodeTile(4, 3, 4, chunk_tiles=2, max_chunks=4)
SMALL = CudaDecodeTile(2, 3, 4, chunk_tiles=2, max_chunks=2)
WHOLE = CudaDecodeTile(2, 3, 1, chunk_tiles=16, max_chunks=1)


BATCHES = {
    "one chunk": (WHOLE, (4, 2, 64), [1, 17, 40], {}),
    "float16": (WHOLE, (4, 2, 64), [1, 17, 40], {"dtype": torch.float16, "norm": False}),
    "eight chunks": (FEW, (4, 2, 128), [33, 90, 700], {"norm": False}),
    "few programs": (MANY, (4, 2, 128), [1, 2, 16, 17, 100], {"multiprocessors": 1}),
    "many tokens": (SMALL, (4, 2, 64), [i * 7 % 50 + 1 for i in range(70)], {"multiprocessors": 5}),
    "a longer list": (SMALL, (2, 1, 32), [i * 11 % 40 + 1 for i in range(260)], {"multiprocessors": 9}),
    "a window": (SOME, (3, 1, 96), [5, 60, 130], {"multiprocessors": 2, "window": 40}),
    "six slots": (replace(SOME, warps=4, slots=6, programs=1), (8, 1, 64), [300, 12, 90], {"window": 50}),
    "four slots": (replace(MANY, slots=4, programs=2), (4, 2, 64), [300, 129, 128, 127, 2], {}),
    "not in order": (MANY, (4, 2, 64), [1, 130, 2, 60, 7, 33] * 3, {"multiprocessors": 2, "parts": 2}),
    "rows in parts": (SOME, (4, 2, 64), [33, 2, 90], {"multiprocessors": 1, "parts": 3}),
    "rows in parts, float16": (WHOLE, (3, 1, 96), [7], {"dtype": torch.float16, "parts": 2}),
    "twelve heads": (SOME, (12, 1, 80), [5, 60, 130], {"multiprocessors": 1}),
}


@pytest.mark.parametrize(
    "name",
    slow_but_for(
        BATCHES,
        *("float16", "eight chunks", "few programs", "many tokens", "a longer list", "a window"),
        *("six slots", "four slots", "not in order", "rows in parts", "twelve heads"),
    ),
)
def test_decode_attention_is_right(emulator, name):
    tile, heads, lengths, options = BATCHES[name]
    check_attention(emulator, tile, heads, lengths, **options)


def check_a_random_batch(
    emulator: Emulator,
    chance: random.Random,
    tile: CudaDecodeTile,
    heads: tuple[int, int, int],
    norm: bool,
) -> None:
    num_requests = chance.choice([1, 2, 5, 12, 34])
    longest = chance.choice([3, 40, 300, 600] if num_requests < 5 else [20, 90])
    tile = replace(tile, chunk_tiles=chance.choice([1, 2, 3, 8, 64]), max_chunks=chance.choice([1, 2, 4, 8]))
    check_attention(
        emulator,
        tile,
        heads,
        [chance.randint(1, longest) for _ in range(num_requests)],
        multiprocessors=chance.choice([1, 3, 7, H200_MULTIPROCESSORS]),
        norm=norm,
        window=chance.choice([None, None, 1, 17, 50]),
    )


@pytest.mark.parametrize("seed", range(16))
def test_decode_attention_of_random_batches(emulator, seed):
    """With kernels of `BATCHES`, which are compiled: how contexts are cut is no constant of theirs."""
    kernels = (SMALL, (4, 2, 64), True), (MANY, (4, 2, 128), True), (FEW, (4, 2, 128), False)
    check_a_random_batch(emulator, random.Random(seed), *kernels[seed % 3])


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_decode_attention_of_random_batches_and_models(emulator):
    chance = random.Random(0)
    for _ in range(100):
        kv_heads, group, head_dim = chance.choice([1, 2]), chance.randint(1, 16), 16 * chance.randint(1, 8)
        tile = chance.choice([FEW, SOME, MANY, SMALL, WHOLE])
        check_a_random_batch(
            emulator, chance, tile, (group * kv_heads, kv_heads, head_dim), chance.random() < 0.7
        )


def test_equal_requests_give_equal_bits_wherever_they_are(emulator):
    """Beside any others, in any order and on any number of programs."""
    lengths, head_dim = [90, 3, 40, 77, 90, 16], 64
    num_tokens = len(lengths) + 1
    case = make_case(
        [(length, 1) for length in lengths],
        head_dim=head_dim,
        padded_tokens=1,
        max_query_len=1,
        dtype=torch.bfloat16,
    )
    torch.manual_seed(0)
    rows = random_bf16(num_tokens, (4 + 2 * 2) * head_dim)
    angles = torch.randn(case.batch.max_context, head_dim // 2)
    norm = random_bf16(head_dim)
    heads = HeadPreparation(torch.cat([angles.cos(), angles.sin()], dim=1), norm, norm)
    # The last token is the first one again.
    for tensor in (rows, case.batch.token_rows, case.batch.positions):
        tensor[-1] = tensor[0]

    def attend(order: Tensor, multiprocessors: int) -> Tensor:
        batch = replace(
            case.batch, token_rows=case.batch.token_rows[order], positions=case.batch.positions[order]
        )
        caches = case.k_cache.clone(), case.v_cache.clone()
        with emulated_attention(emulator, SMALL, multiprocessors):
            return gpu_ops.attend_qkv(rows[order], heads, *caches, batch, num_heads=4, scale=case.scale)

    wanted = attend(torch.arange(num_tokens), H200_MULTIPROCESSORS)
    assert torch.equal(wanted[0], wanted[-1])
    for multiprocessors in (1, 2):
        order = torch.randperm(num_tokens)
        assert torch.equal(attend(order, multiprocessors), wanted[order])
