"""Tables of kernels as files: what is written is read, and what is wrong is named."""

import json
from contextlib import nullcontext
from pathlib import Path

import pytest

from ostinato.kernels.linear.tables import Choice, KernelTable, KernelTableError, load_table, save_table
from ostinato.kernels.linear.tiles import (
    CudaGemvTile,
    FragmentsTile,
    GemvTile,
    Library,
    MatrixShape,
    SkinnyTile,
    StreamedTile,
    WideTile,
)

SHAPE = {"out_features": 8, "in_features": 16, "gated": False}
GEMV = {"rows": 4, "block": 1024, "num_warps": 4}
SKINNY = {"tokens": 16, "rows": 64, "block": 128, "num_warps": 4, "num_stages": 3}


def test_every_kind_of_choice_survives_a_file(tmp_path: Path) -> None:
    choices = (
        Choice(1, 1, GemvTile(4, 1024, 4)),
        Choice(2, 15, FragmentsTile(8, 1, 4, 1, 128)),
        Choice(64, 64, SkinnyTile(64, 32, 128, 4, 3, parts=2)),
        Choice(65, 4096, Library()),
    )
    table = KernelTable(
        "sm90-132",
        {
            MatrixShape(8, 128): choices,
            MatrixShape(8, 128, True): choices[:1],
            MatrixShape(24, 256, True): (Choice(1, 1, CudaGemvTile(3, 8, 96)),),
            MatrixShape(64, 512): (Choice(2, 16, StreamedTile(32, 2, 1, 128, 3, 8, 64)),),
        },
    )
    file = tmp_path / "new" / "table.json"
    save_table(table, file, machine={"date": "today"})
    assert load_table(file) == table
    lines = file.read_text().splitlines()
    assert len(lines) == 3 + 4 + 7, "a line for each choice"
    assert json.loads(file.read_text())["machine"] == {"date": "today"}


def written(tmp_path: Path, *choices: object, **changes: object) -> Path:
    file = tmp_path / "table.json"
    content = {"gpu": "sm90-132", "matrices": [SHAPE | {"choices": choices}]} | changes
    file.write_text(json.dumps(content))
    return file


def choice(kernel: str, first: int, last: int, **tile: object) -> dict[str, object]:
    return {"tokens": [first, last], "kernel": kernel, "tile": tile}


@pytest.mark.parametrize(
    ("choices", "told"),
    [
        ([choice("fragments", 2, 8, rows=16, slices=2, num_warps=4, held=1, registers=128)], "divided"),
        ([choice("fragments", 2, 8, rows=8, slices=1, num_warps=4, held=1, registers=999)], "divided"),
        (
            [choice("streamed", 2, 8, rows=8, slices=1, shares=1, chunk=64, slots=2, ahead=1, registers=64)],
            "divided",
        ),
        (
            [choice("cutlass", 1, 1)],
            "one of gemv, cuda_gemv, fragments, streamed, wide, prompt, skinny",
        ),
        ([choice("resident", 2, 16, rows=8, slices=4, width=64, num_warps=4)], "kernel must be one of gemv,"),
        ([choice("gemv", 1, 2, **GEMV)], "<= 1 for this kernel"),
        ([choice("cuda_gemv", 1, 2, rows=1, num_warps=2, registers=96)], "<= 1 for this kernel"),
        ([choice("cuda_gemv", 1, 1, rows=1, num_warps=2, registers=96)], "divided"),
        ([choice("cuda_gemv", 1, 1, rows=1, num_warps=2)], "cuda_gemv has rows, num_warps, registers"),
        ([choice("fragments", 3, 2)], "1 <= first <= last <= 16"),
        ([choice("library", 0, 2)], "1 <= first <= last"),
        ([{"kernel": "library", "tokens": 3}], "tokens must be [first, last]"),
        ([choice("gemv", 1, 1, rows=4)], "a tile of gemv has rows, block, num_warps"),
        ([choice("skinny", 2, 9, **SKINNY, speed=3)], "parts (optional)"),
        ([choice("library", 2, 9, rows=3)], "a tile of library has nothing"),
        ([choice("gemv", 1, 1, **GEMV | {"rows": 3})], "rows must be a power of two"),
        ([choice("gemv", 1, 1, **GEMV | {"rows": "4"})], "rows must be a number"),
        ([choice("skinny", 2, 9, **SKINNY, parts=0)], "parts must be a number"),
        ([choice("skinny", 2, 9, **SKINNY, early=64)], "num_stages, parts (optional)"),
        ([choice("streamed", 2, 17)], "last <= 16 for this kernel"),
        ([choice("wide", 17, 65)], "last <= 64 for this kernel"),
        ([choice("library", 2, 9), choice("library", 9, 12)], "apart and in ascending order"),
        ([17], "kernel must be one of"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_wrong_choice_is_named_with_its_file(tmp_path: Path, choices: list[object], told: str) -> None:
    file = written(tmp_path, *choices)
    with pytest.raises(KernelTableError) as refused:
        load_table(file)
    assert str(file) in str(refused.value)
    assert told in str(refused.value)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"gpu": None}, 'no "gpu"'),
        ({"gpu": "NVIDIA H200"}, "like sm90-132 (H100, H200): make the table again with `ostinato tune`"),
        ({"matrices": {}}, 'no list "matrices"'),
        ({"matrices": [SHAPE]}, "a matrix needs"),
        ({"matrices": [SHAPE | {"gated": 0, "choices": []}]}, "a matrix needs"),
        ({"matrices": [SHAPE | {"choices": []}] * 2}, "there twice"),
        (
            {"matrices": [SHAPE | {"gated": True, "choices": [choice("skinny", 2, 9, **SKINNY, parts=2)]}]},
            "parts of a gated matrix",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_wrong_table_is_refused(tmp_path: Path, changes: dict[str, object], told: str) -> None:
    with pytest.raises(KernelTableError, match=r"table\.json") as refused:
        load_table(written(tmp_path, **changes))
    assert told in str(refused.value)


def test_what_is_no_table_at_all_is_refused(tmp_path: Path) -> None:
    with pytest.raises(KernelTableError, match="cannot be read"):
        load_table(tmp_path / "absent.json")
    (tmp_path / "broken.json").write_text("{")
    with pytest.raises(KernelTableError, match="cannot be read"):
        load_table(tmp_path / "broken.json")


@pytest.mark.parametrize(("last", "fits"), [(8, True), (16, False)])
def test_a_tile_must_fit_into_shared_memory_for_all_its_tokens(tmp_path: Path, last: int, fits: bool) -> None:
    tile = choice("streamed", 2, last, rows=64, slices=8, shares=2, chunk=512, slots=5, ahead=8, registers=64)
    matrix = {"out_features": 2048, "in_features": 8192, "gated": False, "choices": [tile]}
    file = written(tmp_path, matrices=[matrix])
    if fits:
        assert load_table(file).choices
        return
    with pytest.raises(KernelTableError, match=r"16 tokens would take .* bytes of shared memory"):
        load_table(file)


@pytest.mark.parametrize(("registers", "fits"), [(1, False), (32, True), (64, True), (256, False)])
def test_registers_must_be_enough_and_to_be_had(registers: int, fits: bool) -> None:
    shape = MatrixShape(2048, 8192)
    assert StreamedTile(64, 8, 2, 128, 3, 8, registers).fits(shape) is fits
    assert FragmentsTile(8, 1, 4, 1, registers).fits(MatrixShape(8, 128)) is fits


@pytest.mark.parametrize(
    ("tile", "fits"),
    [
        (WideTile(64, 128, 64, 2, 2), True),
        (WideTile(128, 64, 64, 2, 2), False),  # a width that no measurement asked for
        (WideTile(16, 256, 64, 2, 2), False),  # more than 1,024 threads
        (WideTile(24, 64, 64, 2, 2), False),  # a width that `warpgroup.cuh` has not
        (WideTile(32, 64, 64, 1, 2), False),  # nothing to fetch into while multiplying
        (WideTile(32, 64, 64, 2, 9), False),  # more places than tiles
        (WideTile(32, 64, 96, 2, 2), False),  # columns come in 64s
        (WideTile(32, 64, 64, 2, 2, slices=4), True),
        (WideTile(64, 64, 64, 2, 2, slices=16), False),  # too large a cluster
    ],
    ids=str,
)
def test_wide_divides_a_matrix_or_not(tile: WideTile, fits: bool) -> None:
    assert tile.fits(MatrixShape(1024, 512, gated=True)) is fits


def test_a_wide_tile_that_has_no_room_for_squares_is_refused(tmp_path: Path) -> None:
    tile = {"tokens": 32, "rows": 128, "columns": 64, "weight_slots": 10, "token_slots": 12, "slices": 4}
    for out_features, is_refused in ((512, False), (8192, True)):  # rows that become longer follow a norm
        matrix = {"out_features": out_features, "in_features": 8192, "gated": False}
        file = written(tmp_path, matrices=[{**matrix, "choices": [choice("wide", 17, 32, **tile)]}])
        with pytest.raises(KernelTableError, match="shared memory") if is_refused else nullcontext():
            load_table(file)


def test_registers_belong_to_a_quarter_of_a_multiprocessor() -> None:
    """21 warps with 96 registers for each thread would fit, were they not six in one of the quarters."""
    assert WideTile(64, 160, 64, 2, 2).fits(MatrixShape(160, 512, gated=True))
    assert not WideTile(128, 160, 64, 2, 2).fits(MatrixShape(160, 512, gated=True))
