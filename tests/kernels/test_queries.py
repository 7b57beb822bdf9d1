"""Attention of prompts and mixed batches without a GPU: how work is divided, and what kernels find."""

import itertools

import pytest
import torch

from kernels.interpreted import assert_passes
from ostinato.kernels import gpu
from ostinato.kernels.attention import BackendError
from ostinato.kernels.attention.choice import KeyBlocks, Queries, grown, query_class
from ostinato.kernels.gpu import H200, Gpu

QWEN3 = (16, 8, 128)
MODELS = (QWEN3, (32, 8, 64), (32, 8, 128), (14, 2, 64), (32, 32, 80), (8, 1, 256), (71, 1, 64), (16, 8, 256))
HALF = torch.bfloat16


def rung(num_tokens, max_context, heads=QWEN3, dtype=HALF, window=0, requests=256, max_query_len=None):
    requests = min(num_tokens, requests)
    return Queries(
        dtype, num_tokens, requests, max_query_len or num_tokens, max_context, *heads, window=window
    )


@pytest.mark.parametrize("cases", ["few", pytest.param("all", marks=pytest.mark.slow)])
def test_the_kernels_are_right_in_the_interpreter(cases):
    assert_passes("kernels.query_interpreter_checks", cases, 110)


def keys_in_turn(num_tokens, context, limit, heads=QWEN3):
    """That a program reads, one after the other, where one request has all these tokens."""
    tile, chunks = rung(num_tokens, limit, heads).divided(H200)
    assert chunks is not None
    tiles = -(-num_tokens // tile.query_block) * heads[1]
    size = next(size for step in range(99) if (size := grown(chunks.keys, step)) * chunks.parts >= context)
    units = tiles * -(-context // size)
    return -(-units // chunks.programs) * size


@pytest.mark.parametrize("limit", [32_784, 131_072])
def test_few_tokens_behind_a_long_context_are_shared_out_over_the_gpu(limit):
    """16 tokens at 32k took 23 times as long as one: 8 programs read everything, one key after the other.

    Behind 1,000 tokens, where 32k were allowed, one program a KV head read everything again.
    """
    for num_tokens, context, most_keys in (
        (4, 32_768, 1024),
        (16, 32_768, 1024),
        (16, 8192, 256),
        (16, 1024, 256),
        (64, 32_768, 2048),
        (64, 1024, 512),
        (256, 32_768, 8192),
        (256, 1024, 512),
    ):
        assert keys_in_turn(num_tokens, context, limit) == most_keys


def test_chunks_grow_by_steps_so_that_most_programs_have_one():
    for context in range(8192, 32_768, 500):
        assert keys_in_turn(16, context, 131_072) <= 1.55 * context * 8 / 264


def test_prompts_that_fill_the_gpu_and_short_contexts_are_not_cut():
    assert rung(4096, 32_768).divided(H200)[1] is None
    assert rung(16, 200).divided(H200)[1] is None
    assert rung(16, 32_768, window=100).divided(H200)[1] is None
    tile, _ = rung(4096, 32_768).divided(H200)
    assert (tile.query_block * tile.group_block, tile.key_block, tile.num_stages) == (64, 64, 4)


def test_parts_are_bounded_and_chunks_are_whole_blocks():
    for heads, tokens, context, window, dtype in itertools.product(
        MODELS, (1, 4, 16, 64, 256, 512), (512, 8192, 131_072), (0, 4096), (HALF, torch.float32)
    ):
        tile, chunks = rung(tokens, context, heads, dtype, window).divided(H200)
        if chunks is not None:
            sizes = [grown(chunks.keys, step) for step in range(chunks.steps + 1)]
            assert all(size % tile.key_block == 0 for size in sizes)
            part_bytes = tokens * heads[0] * heads[2] * 4
            assert chunks.parts * part_bytes <= 40 << 20
            assert chunks.parts * sizes[-1] >= min(context, window or context)
            ends = [chunks.parts * size for size in sizes]
            gaps = [after - before for before, after in itertools.pairwise(ends)]
            assert all(gap >= tokens for gap in gaps), "a step has chunks of two sizes at most"


def test_a_window_that_begins_anywhere_has_room_for_its_parts():
    for window in (257, 300, 511, 512, 513, 514, 1000):
        _, chunks = rung(4, 8192, window=window).divided(H200)
        seen = {
            position // chunks.keys - max(0, position - window + 1) // chunks.keys + 1
            for position in range(8192)
        }
        assert max(seen) == chunks.parts


def test_drafts_are_verified_with_tiles_of_their_size():
    for queries, rows in ((2, 16), (4, 16), (8, 16), (9, 32), (16, 32)):
        tile, _ = rung(queries * 16, 8192, requests=16, max_query_len=queries).divided(H200)
        assert tile.query_block * tile.group_block == rows
        assert tile.query_block >= queries, "a request is one tile"


def test_few_variants_are_compiled():
    sizes = [*range(4, 33, 4), *range(48, 257, 16), *range(288, 513, 32), 1024, 4096]
    for dtype, heads in itertools.product((HALF, torch.float32), MODELS):
        classes = {query_class(rung(size, 8192, heads, dtype), H200) for size in sizes}
        assert len(classes) <= 8
    assert query_class(rung(8, 8192), H200) != query_class(rung(9, 8192), H200), "other tiles"
    assert query_class(rung(16, 8192), H200) != query_class(rung(16, 32_768), H200), "chunks grow more often"


def test_a_tile_has_room_in_the_shared_memory_of_any_gpu():
    small, middle = Gpu((8, 9), 58), Gpu((8, 0), 108)
    for one, heads, tokens, dtype in itertools.product(
        (small, middle, H200), MODELS, (1, 16, 256, 4096), (HALF, torch.float16, torch.float32)
    ):
        tile, chunks = rung(tokens, 8192, heads, dtype).divided(one)
        blocks = KeyBlocks(tile.key_block, tile.num_stages)
        needed = blocks.shared_bytes(dtype, heads[2], tile.query_block * tile.group_block)
        programs = 1 if chunks is None else -(-chunks.programs // one.multiprocessors)
        assert needed <= one.room_for(programs)


def test_heads_that_have_no_room_are_refused(monkeypatch):
    tiny = Gpu((5, 2), 24)
    monkeypatch.setitem(gpu._SHARED_KIB, tiny.capability, 47)
    with pytest.raises(BackendError, match=r"heads of 512 in torch.float32 takes .* use the torch backend"):
        rung(16, 8192, (8, 8, 512), torch.float32).divided(tiny)
