"""Clause 2: what a padded row holds is declared per field and refilled on every fill."""

import pytest
import torch

from contract.steps import WIDTH, ints, key, make_runner, randn, same, unchanged, wrap, x_field
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


def softmax_by(score, index):
    most = torch.full((6,), -1e9, device=score.device).scatter_reduce(0, index, score, "amax")
    exp = (score - most[index]).exp()
    return exp / torch.zeros(6, device=score.device).scatter_add(0, index, exp)[index].clamp(min=1e-9)


def test_padding_that_joins_a_group_is_found_whatever_groups_the_first_call_has(device):
    for index in ([1, 2, 3, 1, 2, 3, 4, 4], [3, 1, 2, 4, 0, 0, 1, 2]):
        f = wrap(softmax_by, [4, 8])
        f(randn(8, device=device), ints(index, device))
        score, group = randn(6, device=device, seed=1), ints([0, 1, 0, 2, 0, 1], device)
        assert torch.allclose(f(score, group), softmax_by(score, group), atol=1e-5)


def test_padding_with_a_declared_group_of_its_own_is_served(device):
    f = wrap(softmax_by, [4, 8], pads={"index": 5})
    f(randn(8, device=device), ints([1, 2, 3, 1, 2, 3, 4, 4], device))
    score, group = randn(6, device=device, seed=1), ints([0, 1, 0, 2, 0, 1], device)
    assert torch.allclose(f(score, group), softmax_by(score, group), atol=1e-5)
    assert not f.report().failures
    assert f.verify().passed


def test_rounding_of_one_part_of_a_complex_number_is_no_dependence(device):
    w = torch.complex(randn(4, 3, device=device), randn(4, 3, device=device, seed=1))
    f = wrap(lambda z: (z @ w).conj() * (z @ w), [1, 2, 4])
    z = torch.complex(randn(3, 4, device=device, seed=2), randn(3, 4, device=device, seed=3))
    assert torch.allclose(f(z), (z @ w).conj() * (z @ w), atol=1e-5)
    assert not f.report().failures


def test_a_dependence_in_one_part_of_a_complex_number_is_found(device):
    f = wrap(lambda z: torch.complex(z.real, z.imag / len(z)), [1, 2, 4])
    f(torch.complex(randn(3, 4, device=device), randn(3, 4, device=device, seed=1)))
    assert f.report().failures
