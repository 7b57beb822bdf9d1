"""Properties of filling and running, over random fields, sizes and ladders."""

import hypothesis.strategies as st
import torch
from hypothesis import given, settings

from contract.steps import WIDTH, make_runner, mlp, padded, same
from ostinato.graphs import BatchDescriptor, BatchShape, Extent, Field, GraphMode, InputBuffers, Ladder
from ostinato.graphs.inputs.staging import as_array

DTYPES = [torch.bool, torch.int32, torch.int64, torch.float32, torch.float16, torch.bfloat16]


@st.composite
def fields_of_a_step(draw):
    def one(number):
        dtype = draw(st.sampled_from(DTYPES))
        shape = tuple(draw(st.lists(st.integers(1, 4), max_size=2)))
        per = draw(st.sampled_from(Extent))
        values = st.booleans() if dtype is torch.bool else st.integers(-5, 5)
        return Field(
            f"field{number}",
            dtype,
            shape,
            per,
            pad=draw(values),
            poison=draw(st.none() | values),
            dim=0 if per is Extent.FIXED else draw(st.integers(0, len(shape))),
        )

    return [one(number) for number in range(draw(st.integers(1, 5)))]


@st.composite
def sizes(draw):
    """Buffers, a rung in them, and a batch in the rung: (tokens, requests) of each."""
    most_tokens = draw(st.integers(1, 24))
    most_reqs = draw(st.integers(1, most_tokens))
    rung_tokens = draw(st.integers(1, most_tokens))
    rung_reqs = draw(st.integers(1, min(most_reqs, rung_tokens)))
    tokens = draw(st.integers(1, rung_tokens))
    reqs = draw(st.integers(1, min(rung_reqs, tokens)))
    return (most_tokens, most_reqs), (rung_tokens, rung_reqs), (tokens, reqs)


def values_of(field, shape, generator):
    whole = field.full_shape(shape.num_tokens, shape.num_reqs)
    if field.dtype is torch.bool:
        return torch.rand(whole, generator=generator) < 0.5
    if field.dtype.is_floating_point:
        return torch.randn(whole, generator=generator).to(field.dtype)
    return torch.randint(-100, 100, whole, generator=generator, dtype=field.dtype)


def given_as(value, how, device):
    if how == "device":
        return value.to(device)
    return as_array(value) if how == "array" else value


@settings(max_examples=80, deadline=None)
@given(
    fields=fields_of_a_step(),
    size=sizes(),
    poison=st.booleans(),
    seed=st.integers(0, 99),
    how=st.lists(st.sampled_from(["host", "array", "device", "strided"]), min_size=5, max_size=5),
)
def test_a_fill_writes_the_batch_and_the_padding_and_nothing_else(device, fields, size, poison, seed, how):
    (most_tokens, most_reqs), rung, real = size
    buffers = InputBuffers(fields, max_tokens=most_tokens, max_reqs=most_reqs, device=device)
    descriptor, shape = BatchDescriptor(*rung), BatchShape(*real)
    generator = torch.Generator().manual_seed(seed)
    other = InputBuffers(fields, max_tokens=most_tokens, max_reqs=most_reqs, device=device)
    full = BatchShape(*rung)
    # What an earlier, full batch left behind must not survive in the padding.
    buffers.fill({field.name: values_of(field, full, generator) for field in fields}, full, descriptor)
    batch = {field.name: values_of(field, shape, generator) for field in fields}
    passed = {}
    for (name, value), form in zip(batch.items(), how, strict=False):
        strided = form == "strided" and value.dim() > 1
        passed[name] = value.mT.contiguous().mT if strided else given_as(value, form, device)
    before = buffers.arena.clone()
    buffers.fill(passed, shape, descriptor, poison=poison)
    views = buffers.views(descriptor)
    touched = torch.zeros_like(buffers.arena, dtype=torch.bool)
    for field in fields:
        view = views[field.name]
        start = view.data_ptr() - buffers.arena.data_ptr()
        touched[start : start + view.nbytes] = True
        wanted = batch[field.name].to(device)
        if field.per is not Extent.FIXED:
            filler = field.poison_value if poison else field.pad
            rows = field.rows(*rung)
            wanted = padded(wanted, rows, filler, field.dim)
        assert same(view.cpu(), wanted.cpu()), (field, poison)
    end = int(touched.nonzero().max()) + 1
    # Gaps between fields may travel along with a packed copy; behind the rung nothing may change.
    assert same(buffers.arena[end:], before[end:])
    if device.type == "cpu":
        assert same(buffers.arena[~touched], before[~touched])
    assert (other.arena == 0).all()


@settings(max_examples=40, deadline=None)
@given(fields=fields_of_a_step(), size=sizes(), seed=st.integers(0, 99))
def test_the_given_batch_is_never_changed_and_shape_of_finds_its_size(device, fields, size, seed):
    (most_tokens, most_reqs), rung, real = size
    buffers = InputBuffers(fields, max_tokens=most_tokens, max_reqs=most_reqs, device=device)
    shape = BatchShape(*real)
    generator = torch.Generator().manual_seed(seed)
    batch = {field.name: values_of(field, shape, generator).to(device) for field in fields}
    before = {name: value.clone() for name, value in batch.items()}
    buffers.fill(batch, shape, BatchDescriptor(*rung), poison=True)
    assert same(batch, before)
    extents = {field.per for field in fields}
    if Extent.TOKEN in extents and Extent.REQUEST in extents:
        found = buffers.shape_of(batch)
        assert (found.num_tokens, found.num_reqs) == real


@settings(max_examples=30, deadline=None)
@given(fields=fields_of_a_step(), size=sizes(), seed=st.integers(0, 99), data=st.data())
def test_fills_of_changing_size_do_not_depend_on_history(device, fields, size, seed, data):
    (most_tokens, most_reqs), _, _ = size
    used, fresh = (
        InputBuffers(fields, max_tokens=most_tokens, max_reqs=most_reqs, device=device) for _ in range(2)
    )
    generator = torch.Generator().manual_seed(seed)
    for _ in range(4):
        rung_tokens = data.draw(st.integers(1, most_tokens))
        rung_reqs = data.draw(st.integers(1, min(most_reqs, rung_tokens)))
        tokens = data.draw(st.integers(1, rung_tokens))
        shape = BatchShape(tokens, data.draw(st.integers(1, min(tokens, rung_reqs))))
        descriptor = BatchDescriptor(rung_tokens, rung_reqs)
        batch = {field.name: values_of(field, shape, generator) for field in fields}
        used.fill(batch, shape, descriptor)
    fresh.fill(batch, shape, descriptor)
    assert same(
        {name: view.cpu() for name, view in used.views(descriptor).items()},
        {name: view.cpu() for name, view in fresh.views(descriptor).items()},
    )


@settings(max_examples=15, deadline=None)
@given(
    ladder=st.sets(st.integers(1, 20), min_size=1, max_size=4),
    batches=st.lists(st.integers(1, 24), min_size=1, max_size=12),
    mode=st.sampled_from([GraphMode.FULL, GraphMode.PIECEWISE]),
    poison=st.booleans(),
)
def test_run_equals_eager_for_any_ladder_and_any_batches(device, ladder, batches, mode, poison):
    model = mlp(device)
    rungs = Ladder(ladder)
    runner = make_runner(device, lambda x: model(x), rungs, mode=mode)
    runner.poison = poison
    replays = 0
    for seed, n in enumerate(batches):
        x = torch.randn(n, WIDTH, generator=torch.Generator().manual_seed(seed)).to(device)
        out = runner.run({"x": x})
        rung = rungs.round_up(n)
        replays += rung is not None
        with torch.no_grad():
            assert same(out, model(padded(x, rung or n))[:n])
    assert runner.report().replays == replays
    assert sum(runner.eager_steps.values()) == len(batches) - replays
