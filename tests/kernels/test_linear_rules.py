"""Rules for matrices that no table knows: how near they are to what was measured, and that all of it runs."""

from collections.abc import Iterator

import pytest

from ostinato.engine.config import EngineConfig
from ostinato.engine.resolved_config import _chunk_size
from ostinato.graphs import Ladder
from ostinato.kernels.gpu import Gpu
from ostinato.kernels.linear.choice import package_table
from ostinato.kernels.linear.rules import FEWEST_PROMPT_TOKENS, gemv_tile, skinny_bytes, tile_by_rule
from ostinato.kernels.linear.tiles import (
    FUSED,
    IN_CUDA,
    MOST_TOKENS,
    CudaGemvTile,
    FragmentsTile,
    GemvTile,
    Library,
    MatrixShape,
    PromptTile,
    SkinnyTile,
    StreamedTile,
    Tile,
    WideTile,
)

H200 = Gpu((9, 0), 132)
GPUS = [H200, Gpu((9, 0), 114), Gpu((9, 0), 78), Gpu((9, 0), 144)]
PROMPTS = [4096, 16_384]
DECODE = [*range(1, 18), 24, 32, 33, 48, 64, 65, 96, 128, 129, 192, 256]


def layer(hidden: int, inner: int, heads: int, kv_heads: int, head_dim: int) -> list[MatrixShape]:
    qkv = (heads + 2 * kv_heads) * head_dim
    shapes = [(qkv, hidden), (hidden, heads * head_dim), (inner, hidden, True), (hidden, inner)]
    return [MatrixShape(*shape) for shape in shapes]


MODELS = {
    "Qwen3-4B": layer(2560, 9728, 32, 8, 128),
    "Llama-3.2-3B": layer(3072, 8192, 24, 8, 128),
    "Qwen3-0.6B": layer(1024, 3072, 16, 8, 128),
    "Qwen3-1.7B": layer(2048, 6144, 16, 8, 128),
    "Qwen3-8B": layer(4096, 12288, 32, 8, 128),
    "Mistral-7B": layer(4096, 14336, 32, 8, 128),
    "Llama-3.1-70B": layer(8192, 28672, 64, 8, 128),
    "Llama-3.1-405B": layer(16384, 53248, 128, 8, 128),
    "Qwen2.5-0.5B": layer(896, 4864, 14, 2, 64),
    "Qwen2.5-7B": layer(3584, 18944, 28, 4, 128),
    "SmolLM2-135M": layer(576, 1536, 9, 3, 64),
    "Llama-2-13B": layer(5120, 13824, 40, 40, 128),
}
HEADS = [MatrixShape(151936, 2560), MatrixShape(128256, 3072), MatrixShape(49152, 576)]
ODD = [MatrixShape(7, 9), MatrixShape(5, 40_000), MatrixShape(4097, 1024), MatrixShape(333, 1000, True)]


def needed_bytes(tile: Tile, shape: MatrixShape, num_tokens: int) -> int:
    """Shared memory of a program in the form that needs most."""
    match tile:
        case FragmentsTile() | StreamedTile() | WideTile():
            return tile.shared_bytes(shape, num_tokens, norm=True)
        case SkinnyTile():
            return skinny_bytes(tile, shape)
    return 0


@pytest.mark.parametrize("gpu", GPUS, ids=str)
@pytest.mark.parametrize(
    "shape", dict.fromkeys([*(shape for model in MODELS.values() for shape in model), *HEADS, *ODD]), ids=str
)
def test_what_a_rule_says_can_run(gpu, shape):
    """A tile that a table would be refused for must not come from a rule either."""
    for num_tokens in DECODE:
        for cuda in (True, False):
            tile = tile_by_rule(shape, num_tokens, gpu, cuda=cuda)
            assert num_tokens <= MOST_TOKENS.get(type(tile), num_tokens)
            assert needed_bytes(tile, shape, num_tokens) <= gpu.shared_bytes
            if isinstance(tile, IN_CUDA):
                assert cuda
                assert tile.fits(shape)
            if isinstance(tile, GemvTile | SkinnyTile):
                sizes = [tile.rows, tile.block, tile.num_warps]
                assert all(size & (size - 1) == 0 for size in sizes), "as Triton wants them"
            if isinstance(tile, SkinnyTile) and tile.parts > 1:
                assert not shape.gated
                assert shape.in_features % (tile.parts * tile.block) == 0
    for num_tokens in (257, 512, 2048, 3840, 4095):
        assert tile_by_rule(shape, num_tokens, gpu, cuda=True) == Library()
    for num_tokens in (4096, 4608, 16_384):
        tile = tile_by_rule(shape, num_tokens, gpu, cuda=True)
        assert tile == Library() or (isinstance(tile, PromptTile) and tile.fits(shape))
        assert tile_by_rule(shape, num_tokens, gpu, cuda=False) == Library()


@pytest.mark.parametrize("name", MODELS)
def test_prompts_have_a_kernel_of_ours_where_it_was_faster(name):
    """For gates, and for what is added to rows, from the largest step of an engine's ladder on."""
    assert _chunk_size(EngineConfig(""), on_gpu=True) == Ladder.prefill(4096).limit == FEWEST_PROMPT_TOKENS
    qkv, *others = MODELS[name]
    for num_tokens in PROMPTS:
        assert tile_by_rule(qkv, num_tokens, H200, cuda=True) == Library()
        for shape in others:
            # A matrix of 576 rows has tiles for 96 of 132 multiprocessors.
            is_small = shape.out_features == 576 and num_tokens == 4096
            wanted = Library() if is_small else PromptTile()
            assert tile_by_rule(shape, num_tokens, H200, cuda=True) == wanted, shape


@pytest.mark.parametrize("shape", [*HEADS, *ODD, MatrixShape(4100, 8192), MatrixShape(4096, 8196)], ids=str)
def test_heads_and_rows_that_are_not_aligned_are_left_to_cublas(shape):
    for num_tokens in PROMPTS:
        assert tile_by_rule(shape, num_tokens, H200, cuda=True) == Library()


def chosen_kinds() -> Iterator[tuple[MatrixShape, int, Tile, Tile]]:
    """Every choice of the committed table, and what the rule says in its place."""
    table = package_table(H200)
    assert table is not None
    for shape, choices in table.choices.items():
        for choice in choices:
            yield shape, choice.last, choice.tile, tile_by_rule(shape, choice.last, H200, cuda=True)


LLAMA_1B, LLAMA_8B = layer(2048, 8192, 32, 8, 64), MODELS["Mistral-7B"]
KNOWN_TO_DIFFER = {
    # `wide` came after these were measured, and was measured at 32 tokens only.
    **{(shape, 64): (SkinnyTile, WideTile) for shape in LLAMA_1B},
    # The fused form is 3% behind there (docs/kernels.md), and a percent ahead for Llama-3.2-1B.
    **{(shape, 16): (SkinnyTile, StreamedTile) for shape in LLAMA_8B},
    (LLAMA_8B[1], 16): (Library, StreamedTile),
    (MatrixShape(1024, 3072), 256): (Library, SkinnyTile),  # 1.4%
}


def test_the_rules_choose_the_kernels_that_were_measured_to_be_best():
    differing = {
        (shape, tokens): (type(measured), type(ruled))
        for shape, tokens, measured, ruled in chosen_kinds()
        if type(measured) is not type(ruled)
    }
    assert differing == KNOWN_TO_DIFFER
    assert len(differing) < 0.15 * len(list(chosen_kinds()))


def test_programs_of_a_rule_are_about_as_many_as_those_that_were_measured():
    """Of the kernels whose time is decided by that: within a factor of two, but for `streamed`'s few."""
    for shape, tokens, measured, ruled in chosen_kinds():
        if type(measured) is type(ruled) is WideTile:
            assert 0.5 <= programs(ruled, shape) / programs(measured, shape) <= 2, (shape, tokens)
        if type(measured) is type(ruled) is StreamedTile:
            warps = [programs(tile, shape) * tile.num_warps(shape) for tile in (measured, ruled)]
            assert 0.5 <= warps[1] / warps[0] <= 2, (shape, tokens)


def programs(tile: WideTile | StreamedTile, shape: MatrixShape) -> int:
    return shape.out_features // tile.rows * tile.slices


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("gpu", GPUS[:2], ids=str)
def test_all_matrices_of_a_layer_have_one_form(name, gpu):
    """A step is fused only as far as all its matrices are, and norms are left half done by all or by none."""
    if name in ("SmolLM2-135M", "Qwen2.5-0.5B"):
        pytest.skip("hidden sizes that are no multiple of 256 have no fused tile for all: the general form")
    for num_tokens in DECODE:
        tiles = [tile_by_rule(shape, num_tokens, gpu, cuda=True) for shape in MODELS[name]]
        assert len({isinstance(tile, FUSED) for tile in tiles}) == 1, (num_tokens, tiles)
        assert len({isinstance(tile, WideTile) for tile in tiles}) == 1, (num_tokens, tiles)


@pytest.mark.parametrize(
    ("width", "idle"), [(1024, 0), (2560, 0), (3072, 0), (4096, 0), (9728, 0.06), (14336, 0), (18944, 0.03)]
)
def test_a_gemv_leaves_few_lanes_idle(width, idle):
    """2,560 columns in one block of 4,096 left a third of the lanes without work."""
    for gated in (False, True):
        tile = gemv_tile(MatrixShape(8192, width, gated), H200)
        lanes = -(-width // tile.block) * tile.block
        assert 1 - width / lanes <= idle
        assert tile.rows * tile.block * (2 if gated else 1) <= 8192


def test_rows_of_uneven_width_are_held_whole_where_that_is_as_fast():
    tile = tile_by_rule(MatrixShape(6144, 2560), 1, H200, cuda=True)
    assert isinstance(tile, CudaGemvTile)
    assert isinstance(tile_by_rule(MatrixShape(6144, 2560), 1, H200, cuda=False), GemvTile)
    assert isinstance(tile_by_rule(MatrixShape(9728, 2560, True), 1, H200, cuda=True), GemvTile)


@pytest.mark.parametrize(
    "gpu", [Gpu((8, 0), 108), Gpu((8, 9), 142), Gpu((10, 0), 148), Gpu((12, 0), 170)], ids=str
)
def test_elsewhere_one_token_runs_a_gemv_and_the_rest_cublas(gpu):
    for shape in (*MODELS["Qwen3-4B"], HEADS[0]):
        for cuda in (False, True):
            assert isinstance(tile_by_rule(shape, 1, gpu, cuda=cuda), GemvTile)
            assert all(
                tile_by_rule(shape, count, gpu, cuda=cuda) == Library() for count in (*DECODE[1:], *PROMPTS)
            )
