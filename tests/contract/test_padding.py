"""Clause 2: what a padded row holds is declared per field and refilled on every fill."""

import pytest
import torch

from contract.steps import WIDTH, ints, key, make_runner, randn, same, unchanged, x_field
from ostinato.graphs import BatchDescriptor, BatchShape, Field, InputBuffers

FIELDS = [
    x_field(),
    Field("ids", torch.int64, pad=7),
    Field("lengths", torch.int32, per="request", pad=1),
    Field("live", torch.bool, pad=False),
    Field("scale", torch.float32, (3,), per="fixed"),
]


def batch_of(n: int, device: torch.device, seed: int = 0) -> dict[str, torch.Tensor]:
    return {
        "x": randn(n, WIDTH, device=device, seed=seed),
        "ids": torch.arange(100, 100 + n, device=device),
        "lengths": torch.full((n,), 50, dtype=torch.int32, device=device),
        "live": torch.ones(n, dtype=torch.bool, device=device),
        "scale": randn(3, device=device, seed=seed),
    }


def step(x, ids, lengths, live, scale):
    return x / lengths[:, None] + ids[:, None] + live[:, None] * scale.sum()


@pytest.mark.parametrize("n", [1, 2, 5, 8])
def test_tails_hold_the_declared_values_after_larger_batches(device, n):
    runner = make_runner(device, step, [8], fields=FIELDS)
    runner.run(batch_of(8, device))
    batch = batch_of(n, device, seed=1)
    runner.run(batch)
    views = runner.buffers.views(BatchDescriptor.decode(8))
    for field in FIELDS[:-1]:
        assert same(views[field.name][:n], batch[field.name])
        assert (views[field.name][n:] == field.pad).all(), field.name
    assert same(views["scale"], batch["scale"])


def test_padded_rows_have_length_one_so_that_a_division_by_it_is_finite(device):
    padded_rows = torch.zeros(8, WIDTH, device=device)

    def keep_all(x, ids, lengths, live, scale):
        padded_rows.copy_(step(x, ids, lengths, live, scale))
        return padded_rows[:1] * 1

    runner = make_runner(device, keep_all, [8], fields=FIELDS)
    runner.run(batch_of(8, device))
    runner.run(batch_of(2, device))
    assert padded_rows.isfinite().all()
    assert (padded_rows[2:] == 7).all()


def test_a_smaller_rung_is_padded_by_the_same_code(device):
    runner = make_runner(device, step, [2, 4, 8], fields=FIELDS)
    for n in (8, 3, 1, 7, 2, 5):
        batch = batch_of(n, device, seed=n)
        assert same(runner.run(batch), step(**batch)), n


def test_filling_one_rung_leaves_the_rest_of_the_arena_alone(device):
    buffers = InputBuffers(FIELDS, max_tokens=8, device=device)
    buffers.arena.fill_(0xAB)
    views = buffers.views(BatchDescriptor.decode(2))
    end = max(view.data_ptr() + view.nbytes for view in views.values()) - buffers.arena.data_ptr()
    with unchanged(buffers.arena[end:]):
        buffers.fill(batch_of(1, device), BatchShape.decode(1), BatchDescriptor.decode(2))


def test_ten_thousand_replays_of_a_masked_step_leave_request_row_zero_as_it_was(device):
    lengths = ints([1, 10, 20, 30, 40], device)
    kv = torch.zeros(5, 4, device=device)

    def advance(rows):
        live = (rows != 0).to(torch.int64)
        kv.index_put_((rows, lengths[rows] % 4), (lengths[rows] * live).to(torch.float32))
        lengths.index_add_(0, rows, live)
        return lengths[rows]

    fields = [Field("rows", torch.int64)]
    runner = make_runner(device, advance, [4], fields=fields, sinks={"row 0": kv[0]})
    batch = {"rows": ints([3, 1], device)}
    for _ in range(10_000):
        runner.run(batch)
    assert lengths.tolist() == [1, 10_010, 20, 10_030, 40]
    assert kv[0].tolist() == [0, 0, 0, 0]
    assert kv[1].max() == 10_009
    assert runner.report().replays == 10_000


def test_without_the_mask_row_zero_does_advance(device):
    lengths = ints([1, 10, 20], device)

    def advance(rows):
        return lengths.index_add_(0, rows, torch.ones_like(rows))

    runner = make_runner(device, advance, [4], fields=[Field("rows", torch.int64)])
    runner.run({"rows": ints([2], device)})
    assert lengths.tolist() == [4, 10, 21]


def test_padded_rows_write_only_the_reserved_page(device):
    pages = torch.zeros(4, 2, WIDTH, device=device)

    def write(x, page, offset):
        pages.index_put_((page, offset), x)
        return x + pages[page, offset]

    fields = [x_field(), Field("page", torch.int64), Field("offset", torch.int64)]
    runner = make_runner(device, write, [8], fields=fields, sinks={"page 0": pages[0]})
    x = randn(2, WIDTH, device=device)
    with unchanged(pages[1], pages[2, 0], pages[3, 1]):
        runner.run({"x": x, "page": ints([2, 3], device), "offset": ints([1, 0], device)})
    assert same(pages[2, 1], x[0])
    assert same(pages[3, 0], x[1])
    assert runner.graphs[key(8)].padding_waste == 0.75


def test_rows_may_be_counted_along_another_dimension(device):
    def columns(positions):
        return positions[0] * 10 + positions[2]

    fields = [Field("positions", torch.int64, (3,), dim=1, pad=4)]
    runner = make_runner(device, columns, [4], fields=fields)
    runner.run({"positions": torch.full((3, 4), 9, device=device)})
    positions = torch.arange(6, device=device).view(3, 2)
    assert same(runner.run({"positions": positions}), columns(positions))
    assert (runner.buffers.views(BatchDescriptor.decode(4))["positions"][:, 2:] == 4).all()
