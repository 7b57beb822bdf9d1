"""Attention of prompts and mixed batches without a GPU: how work is divided, and what kernels find."""

import itertools

import pytest
import torch

from kernels.interpreted import assert_passes
from ostinato.kernels import gpu
from ostinato.kernels.attention import BackendError
from ostinato.kernels.attention.query_tiles import Queries, query_class
from ostinato.kernels.attention.shared_memory import KeyBlocks
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


def test_few_tokens_behind_a_long_context_are_shared_out_over_the_gpu():
    """16 tokens at 32k took 23 times as long as one: 8 programs read everything, one key after the other."""
    for num_tokens, most_keys in ((4, 1024), (16, 1024), (64, 2048), (256, 8192)):
        _, chunks = rung(num_tokens, 32_768).divided(H200)
        assert chunks is not None
        tiles = -(-num_tokens * 2 // 64) * 8
        units = tiles * -(-32_768 // chunks.keys)
        assert chunks.programs == 264
        assert -(-units // chunks.programs) * chunks.keys <= most_keys, "keys that a program reads in turn"


def test_short_contexts_are_shared_out_too_where_long_ones_are_allowed():
    """Behind 1,000 tokens 16 took 27 us instead of 13, where 32k were allowed: one program a KV head."""
    for num_tokens, first_keys in ((16, 256), (256, 1024)):
        _, chunks = rung(num_tokens, 32_784).divided(H200)
        assert chunks.grow
        assert chunks.keys // 4 == first_keys
    assert not rung(16, 8192).divided(H200)[1].grow, "the shortest chunks are short enough"
    assert not rung(16, 32_768, window=8192).divided(H200)[1].grow, "a window begins anywhere"


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
            assert chunks.keys % tile.key_block == 0
            part_bytes = tokens * heads[0] * heads[2] * 4
            assert chunks.parts * part_bytes <= 40 << 20
            seen = min(context, window or context)
            assert chunks.parts * chunks.keys >= seen


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
