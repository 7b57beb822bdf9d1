"""`ostinato tune`: what it tries, what it keeps, what it says without a GPU. Times are made up here."""

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from ostinato.cli.main import main
from ostinato.kernels.cuda import compiled
from ostinato.kernels.gpu import Gpu
from ostinato.kernels.linear.choice import choose, package_table
from ostinato.kernels.linear.rules import tile_by_rule
from ostinato.kernels.linear.tables import Choice, KernelTable, load_table, save_table
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
from ostinato.models.config import ModelConfig
from ostinato.models.transformer import Transformer
from ostinato.tools.tune import candidates, descent, tuning
from ostinato.tools.tune.descent import Tuner

GPU = Gpu((9, 0), 132)
QWEN3 = [
    MatrixShape(4096, 1024),
    MatrixShape(1024, 2048),
    MatrixShape(3072, 1024, True),
    MatrixShape(1024, 3072),
]
LLAMA_8B = [
    MatrixShape(6144, 4096),
    MatrixShape(4096, 4096),
    MatrixShape(14336, 4096, True),
    MatrixShape(4096, 14336),
]
LLAMA_70B = [
    MatrixShape(10240, 8192),
    MatrixShape(8192, 8192),
    MatrixShape(28672, 8192, True),
    MatrixShape(8192, 28672),
]


class MadeUpStep:
    """Stands for all layers of a step; nothing runs."""

    def __init__(self, model: Transformer, batch_size: int, *, num_layers: int, context: int) -> None:
        self.num_tokens = batch_size

    def run_layers(self) -> None: ...

    def run_head(self) -> None: ...


class MadeUpTimes:
    """A time by the tiles that are the choice at the moment, `cost` for each matrix."""

    def __init__(self, cost, model: Transformer) -> None:
        self.cost, self.model = cost, model
        self.forms: set[str] = set()

    def __call__(self, run, **_: int) -> float:
        num_tokens = run.__self__.num_tokens
        *layer, head = (shape for shape, _ in self.model.products_of(1, 1))
        shapes = [head] if run.__name__ == "run_head" else layer
        tiles = [choose(shape, num_tokens, torch.bfloat16, torch.device("cpu")) for shape in shapes]
        if len(shapes) > 1:
            is_fused = all(isinstance(tile, FUSED) for tile in tiles)
            assert len({isinstance(tile, WideTile) for tile in tiles}) == 1, "wide for all or for none"
            is_wide = isinstance(tiles[0], WideTile)
            self.forms.add("few" if is_fused else "scaled" if is_wide else "general")
        return sum(map(self.cost, shapes, tiles))


def tuner_with(
    monkeypatch: pytest.MonkeyPatch,
    tiny_config: Path,
    cost,
    *,
    shapes=QWEN3,
    dtype: torch.dtype = torch.bfloat16,
    hopper: bool = True,
) -> tuple[Tuner, MadeUpTimes]:
    model = Transformer(ModelConfig.load(tiny_config), dtype=dtype)
    model.matrix_shapes = tuple(shapes)
    times = MadeUpTimes(cost, model)
    monkeypatch.setattr(descent, "LayerStep", MadeUpStep)
    monkeypatch.setattr(descent, "compiling_only", lambda _: nullcontext())
    monkeypatch.setattr(descent, "graph_us", times)
    for module in (descent, compiled):
        monkeypatch.setattr(module, "is_supported", lambda _: True)
        monkeypatch.setattr(module, "has_warpgroup_products", lambda _: hopper)
    return Tuner(model, GPU), times


def test_the_best_of_each_matrix_is_found(monkeypatch, tiny_config):
    """Also one that is only reached from another by a change of one value."""
    wanted = SkinnyTile(64, 64, 128, 4, 2, parts=4)

    def cost(shape: MatrixShape, tile: Tile) -> float:
        if shape == QWEN3[1]:
            near = isinstance(tile, SkinnyTile) and (tile.rows, tile.block, tile.parts) == (64, 128, 4)
            return 5.0 if tile == wanted else 8.0 if near else 10.0
        return 3.0 if isinstance(tile, Library) else 4.0

    tuner, _ = tuner_with(monkeypatch, tiny_config, cost)
    found = tuner.find(128, {})
    assert found.tiles[QWEN3[1]] == wanted
    assert all(found.tiles[shape] == Library() for shape in (QWEN3[0], QWEN3[2], QWEN3[3], tuner.head))
    assert found.layer_us == pytest.approx(14 / descent.LAYERS)
    assert found.library_us == pytest.approx(19 / descent.LAYERS)
    assert found.head_us == 3.0


@pytest.mark.parametrize("gemv", [GemvTile, CudaGemvTile])
def test_what_is_found_from_one_size_to_the_next_can_be_loaded(monkeypatch, tiny_config, tmp_path, gemv):
    """A gemv looks fast at every size if it is tried there, for it takes one token only."""
    costs = {gemv: 1.0, FragmentsTile: 2.0, WideTile: 4.0}
    tuner, _ = tuner_with(monkeypatch, tiny_config, lambda _, tile: costs.get(type(tile), 3.0))
    found = []
    for num_tokens, kind in ((1, gemv), (8, FragmentsTile), (16, FragmentsTile), (17, Library)):
        found.append(tuner.find(num_tokens, found[-1].tiles if found else {}))
        for tile in found[-1].tiles.values():
            assert num_tokens <= MOST_TOKENS.get(type(tile), num_tokens)
        assert all(isinstance(found[-1].tiles[shape], kind) for shape in QWEN3)
    save_table(tuning.filled(KernelTable("sm90-132", {}), found), tmp_path / "table.json")
    load_table(tmp_path / "table.json")


def test_a_wide_tile_from_one_size_to_the_next_can_be_loaded(monkeypatch, tiny_config, tmp_path):
    """It stays where nothing is better."""
    costs = {WideTile: 1.0, FragmentsTile: 2.0}
    tuner, _ = tuner_with(monkeypatch, tiny_config, lambda _, tile: costs.get(type(tile), 3.0))
    found = [tuner.find(8, {})]
    for num_tokens in (16, 48, 64):
        found.append(tuner.find(num_tokens, found[-1].tiles))
        assert all(isinstance(found[-1].tiles[shape], WideTile) for shape in QWEN3)
    save_table(tuning.filled(KernelTable("sm90-132", {}), found), tmp_path / "table.json")
    table = load_table(tmp_path / "table.json")
    for shape in QWEN3:
        few, wide = table.choices[shape]
        assert isinstance(few.tile, FragmentsTile)
        assert wide == Choice(9, 64, found[1].tiles[shape])


def test_times_of_all_forms_are_kept(monkeypatch, tiny_config):
    tuner, _ = tuner_with(monkeypatch, tiny_config, lambda *_: 1.0)
    tried = tuner.find(16, {}).tried[QWEN3[0]]
    assert {FragmentsTile, WideTile, Library} <= {type(tile) for tile in tried}


@pytest.mark.parametrize(("fragments_us", "wins"), [(1.0, True), (9.0, False)])
def test_both_forms_of_a_step_are_tried(monkeypatch, tiny_config, fragments_us, wins):
    tuner, times = tuner_with(
        monkeypatch,
        tiny_config,
        lambda shape, tile: fragments_us if isinstance(tile, FragmentsTile) else 2.0,
    )
    found = tuner.find(8, {})
    assert times.forms == {"few", "general"}
    assert all(isinstance(found.tiles[shape], FragmentsTile) == wins for shape in QWEN3)
    assert not isinstance(found.tiles[tuner.head], FragmentsTile)


@pytest.mark.parametrize("fastest", [FragmentsTile, WideTile, Library])
@pytest.mark.parametrize("start", [{}, {QWEN3[2]: WideTile(32, 32, 128, 4, 4, 2)}], ids=["", "from wide"])
def test_each_of_three_forms_of_a_step_can_win(monkeypatch, tiny_config, fastest, start):
    tuner, times = tuner_with(
        monkeypatch, tiny_config, lambda _, tile: 1.0 if isinstance(tile, fastest) else 2.0
    )
    found = tuner.find(16, start)
    assert times.forms == {"few", "scaled", "general"}
    assert all(isinstance(found.tiles[shape], fastest) for shape in QWEN3)
    assert not isinstance(found.tiles[tuner.head], WideTile)
    assert WideTile not in map(type, found.tried[tuner.head])


def test_the_best_wide_tiles_are_found(monkeypatch, tiny_config):
    """Also one that is only reached from another by a change of one value."""
    wanted = WideTile(64, 64, 64, 10, 4)

    def cost(shape: MatrixShape, tile: Tile) -> float:
        if shape == QWEN3[0] and isinstance(tile, WideTile):
            near = replace(wanted, weight_slots=7, token_slots=7)
            return 5.0 if tile == wanted else 8.0 if tile == near else 9.0
        return 10.0 if not isinstance(tile, WideTile) else 3.0

    tuner, _ = tuner_with(monkeypatch, tiny_config, cost)
    found = tuner.find(64, {})
    assert found.tiles[QWEN3[0]] == wanted
    assert found.layer_us == pytest.approx(14 / descent.LAYERS)


@pytest.mark.parametrize(
    ("num_tokens", "changed"),
    [
        (8, {}),
        (65, {}),
        (32, {"hopper": False}),
        (32, {"dtype": torch.float16}),
        (32, {"shapes": [MatrixShape(4096, 1000), MatrixShape(1000, 2048), *QWEN3[2:]]}),
    ],
    ids=["few tokens", "many tokens", "another GPU", "another dtype", "hidden size 1000"],
)
def test_where_wide_does_not_run_it_is_not_tried(monkeypatch, tiny_config, num_tokens, changed):
    tuner, times = tuner_with(monkeypatch, tiny_config, lambda *_: 1.0, **changed)
    found = tuner.find(num_tokens, {})
    assert "scaled" not in times.forms
    assert not any(isinstance(tile, WideTile) for tried in found.tried.values() for tile in tried)


def test_one_token_runs_fused_kernels(monkeypatch, tiny_config):
    tuner, _ = tuner_with(monkeypatch, tiny_config, lambda shape, tile: getattr(tile, "rows", 9.0))
    found = tuner.find(1, {})
    assert all(isinstance(tile, FUSED) and tile.rows == 1 for tile in found.tiles.values())


@pytest.mark.parametrize("start", [SkinnyTile(64, 128, 64, 8, 4), WideTile(64, 64, 64, 4, 4)])
def test_a_tile_that_gains_next_to_nothing_is_not_worth_compiling(monkeypatch, tiny_config, start):
    def cost(shape: MatrixShape, tile: Tile) -> float:
        if isinstance(tile, WideTile) != isinstance(start, WideTile):
            return 101.0
        return 100.0 if tile == start else 99.9

    tuner, _ = tuner_with(monkeypatch, tiny_config, cost)
    found = tuner.find(64, {QWEN3[0]: start})
    assert found.tiles[QWEN3[0]] == start


@pytest.mark.parametrize("num_tokens", [1, 8, 16])
def test_fused_candidates_divide_the_matrix(num_tokens):
    for shape in QWEN3:
        tiles = candidates.fused_tiles(shape, num_tokens, cuda=True, gpu=GPU)
        singles = {GemvTile, CudaGemvTile} if num_tokens == 1 else set()
        assert {type(tile) for tile in tiles} - {StreamedTile} == {FragmentsTile} | singles
        assert num_tokens > 1 or StreamedTile not in map(type, tiles)
        assert all(tile.fits(shape) for tile in tiles if isinstance(tile, IN_CUDA))
        plain = candidates.fused_tiles(shape, num_tokens, cuda=False, gpu=GPU)
        assert plain == [tile for tile in tiles if not isinstance(tile, IN_CUDA)]


def cuda_gemv_tiles(shape: MatrixShape) -> list[CudaGemvTile]:
    tiles = candidates.fused_tiles(shape, 1, cuda=True, gpu=GPU)
    return [tile for tile in tiles if isinstance(tile, CudaGemvTile)]


def test_candidates_of_cuda_gemv_are_few_and_enough():
    table = package_table(GPU)
    for shape, choices in table.choices.items():
        tiles = cuda_gemv_tiles(shape)
        assert 3 <= len(tiles) <= 15
        assert all(shape.out_features // (tile.rows * tile.num_warps) >= 96 for tile in tiles)
        measured = [choice.tile for choice in choices if isinstance(choice.tile, CudaGemvTile)]
        for tile in measured:
            assert (tile.rows, tile.num_warps) in [(other.rows, other.num_warps) for other in tiles]
    assert cuda_gemv_tiles(MatrixShape(4096, 1000)) == []
    assert cuda_gemv_tiles(MatrixShape(128, 1024)) == []


def test_candidates_of_streamed_are_few_and_enough():
    table = package_table(GPU)
    for shape, choices in table.choices.items():
        for choice in choices:
            if not isinstance(choice.tile, StreamedTile):
                continue
            bases = candidates.fused_tiles(shape, choice.last, cuda=True, gpu=GPU)
            bases = [tile for tile in bases if isinstance(tile, StreamedTile)]
            assert 3 <= len(bases) <= 40
            finer = [tile for base in bases for tile in candidates.refined(base, shape, GPU)]
            assert choice.tile in [*bases, *finer]
            assert all(tile.fits(shape) for tile in finer)


def test_candidates_of_wide_are_few_and_enough():
    table = package_table(GPU)
    measured = [
        (shape, choice)
        for shape, choices in table.choices.items()
        for choice in choices
        if isinstance(choice.tile, WideTile)
    ]
    assert len({shape for shape, _ in measured}) >= 12, "all matrices of three models"
    for shape, choice in measured:
        bases = candidates.wide_tiles(shape, choice.last, gpu=GPU)
        finer = [tile for base in bases for tile in candidates.refined(base, shape, GPU)]
        assert choice.tile in [*bases, *finer]


@pytest.mark.parametrize("shape", [*QWEN3, *LLAMA_8B, *LLAMA_70B], ids=str)
@pytest.mark.parametrize("num_tokens", [9, 16, 32, 64])
def test_wide_candidates_fit_the_gpu_and_the_matrix(shape, num_tokens):
    bases = candidates.wide_tiles(shape, num_tokens, gpu=GPU)
    assert 1 <= len(bases) <= 40
    assert len(set(bases)) == len(bases)
    assert all(tile.weight_slots == tile.token_slots for tile in bases)
    finer = [candidates.refined(base, shape, GPU) for base in bases]
    assert all(len(tiles) <= 3 for tiles in finer)
    for tile in [*bases, *(tile for tiles in finer for tile in tiles)]:
        assert tile.fits(shape)
        assert tile.shared_bytes(shape, norm=True) <= GPU.shared_bytes
        assert num_tokens <= tile.tokens


@pytest.mark.parametrize("hidden", [1000, 864, 100])
def test_hidden_sizes_in_no_tiles_have_no_wide_candidates(hidden):
    for shape in (MatrixShape(4096, hidden), MatrixShape(hidden, 4096), MatrixShape(8192, hidden, True)):
        for num_tokens in (9, 64):
            assert candidates.wide_tiles(shape, num_tokens, gpu=GPU) == []


def test_the_kernel_of_prompts_is_tried_where_it_is_the_choice():
    """A table that was made without would put cuBLAS in its place."""
    present = {shape: tile_by_rule(shape, 4096, GPU, cuda=True) for shape in QWEN3}
    form = descent.Form(descent.SEPARATE, {shape: [Library()] for shape in QWEN3}).beside(present)
    assert [PromptTile() in tiles for tiles in form.candidates.values()] == [False, True, True, True]


@pytest.mark.parametrize("shape", [*QWEN3, MatrixShape(128_256, 4096), MatrixShape(77, 100)], ids=str)
@pytest.mark.parametrize("num_tokens", [2, 16, 33, 100, 512])
def test_candidates_fit_the_gpu_and_the_kernel(shape, num_tokens):
    small = Gpu((8, 9), 142)
    tiles = candidates.separate_tiles(shape, num_tokens, in_parts=True, gpu=small)
    assert tiles[0] == Library()
    for tile in [
        *tiles[1:],
        *(finer for base in tiles for finer in candidates.refined(base, shape, small)),
    ]:
        assert isinstance(tile, SkinnyTile)
        rows = tile.rows * (2 if shape.gated else 1)
        assert tile.num_stages * tile.block * (rows + tile.tokens) * 2 <= small.shared_bytes
        assert tile.parts == 1 or not shape.gated


def test_the_table_has_ranges_from_one_measured_size_to_the_next(monkeypatch, tiny_config, tmp_path):
    tuner, _ = tuner_with(
        monkeypatch,
        tiny_config,
        lambda shape, tile: 1.0 if isinstance(tile, GemvTile | Library) else 2.0,
    )
    table = tuning.filled(KernelTable("sm90-132", {}), [tuner.find(tokens, {}) for tokens in (1, 8, 32)])
    [one, more] = table.choices[QWEN3[0]]
    assert (one.first, one.last, type(one.tile)) == (1, 1, GemvTile)
    assert more == Choice(2, 32, Library()), "equal neighbours are one range"
    assert tuning.filled(KernelTable("sm90-132", {}), [tuner.find(8, {})]).find(QWEN3[0], 1) is None


def test_without_a_gpu_it_is_refused_in_one_line(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr("sys.argv", ["ostinato", "tune"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 1
    [line] = capsys.readouterr().err.splitlines()
    assert line == "ostinato: tune needs an NVIDIA GPU, but torch finds none on this machine"


def test_a_bad_list_of_tokens_is_refused():
    from ostinato.cli.main import app

    ran = CliRunner().invoke(app, ["tune", "--tokens", "8,x"])
    assert ran.exit_code == 2
    assert "--tokens" in ran.output
