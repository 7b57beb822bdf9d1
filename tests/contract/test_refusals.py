"""What cannot be captured is refused at the line that does it, and does no lasting harm."""

import re
from pathlib import Path

import pytest
import torch

from contract.steps import WIDTH, make_runner, randn, same
from ostinato.graphs import CaptureError, CaptureOptions, GraphMode, Reason, eager_boundary, graphed

HERE = Path(__file__).name


def item(x):
    return x * x.sum().item()


def truth(x):
    return x * 2 if x.sum() > 0 else x


def nonzero(x):
    return x * 2 + x.nonzero().size(0)


def mask(x):
    return x * 2 + x[x > 0].sum()


def to_list(x):
    return x * x.sum(1).tolist()[0]


def to_host(x):
    return x.cpu().to(x.device) * 2


def printed(x):
    print(x)
    return x * 2


def to_int(x):
    return x * int(x.sum())


ILLEGAL = {
    item: "x.sum().item()",
    truth: "if x.sum() > 0",
    nonzero: "x.nonzero()",
    mask: "x[x > 0]",
    to_list: "tolist()",
    printed: "print(x)",
    to_int: "int(x.sum())",
}


def works(device):
    """A good step can be captured, and random numbers can be drawn, inside graphs and outside."""
    assert torch.rand(3, device=device).shape == (3,)
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
    runner = make_runner(device, lambda x: torch.nn.functional.dropout(x, 0.5), [2, 4])
    batch = {"x": torch.ones(4, WIDTH, device=device)}
    draws = [runner.run(batch).clone() for _ in range(2)]
    assert not same(draws[0], draws[1])
    torch.manual_seed(1)
    assert torch.randn(2, device=device).isfinite().all()
    return True


@pytest.mark.parametrize("mode", [GraphMode.FULL, GraphMode.PIECEWISE])
@pytest.mark.parametrize("step", ILLEGAL, ids=lambda step: step.__name__)
def test_an_illegal_operation_is_refused_with_its_file_line_and_text(device, step, mode, capsys):
    options = CaptureOptions(strict=True)
    runner = make_runner(device, step, [2, 4], mode=mode, options=options, capture=False)
    with pytest.raises(CaptureError) as caught:
        runner.capture(progress=False)
    message = str(caught.value)
    assert re.search(rf"{HERE}:\d+ in {step.__name__}", message), message
    assert ILLEGAL[step] in message
    assert works(device)
    assert runner.graphs == {}


def test_the_line_named_is_the_innermost_of_the_users(device):
    def deep(x):
        return item(x)

    first = item.__code__.co_firstlineno
    runner = make_runner(device, deep, [2], options=CaptureOptions(strict=True), capture=False)
    with pytest.raises(CaptureError, match=rf"{HERE}:{first + 1} in item") as caught:
        runner.capture(progress=False)
    assert caught.value.where is not None
    assert f"{HERE}:{first + 1}" in caught.value.where


@pytest.mark.parametrize("step", [item, mask], ids=lambda step: step.__name__)
def test_without_strict_the_rung_is_given_up_and_its_batches_run_eagerly(device, step):
    runner = make_runner(device, step, [2, 4], capture=False)
    report = runner.capture(progress=False)
    assert len(report.failures) == 2
    assert all(HERE in cause for cause in report.failures.values())
    x = randn(3, WIDTH, device=device)
    assert same(runner.run({"x": x}), step(x))
    assert runner.eager_steps == {Reason.CAPTURE_FAILED: 1}
    assert works(device)


def test_a_failed_capture_between_good_ones_harms_neither(device):
    good = make_runner(device, lambda x: x + torch.rand_like(x), [4])
    batch = {"x": torch.zeros(4, WIDTH, device=device)}
    torch.manual_seed(2)
    before = [good.run(batch).clone() for _ in range(2)]
    bad = make_runner(device, item, [4], capture=False, pool=good.pool)
    bad.capture(progress=False)
    assert len(bad.failures) == 1
    torch.manual_seed(2)
    assert same([good.run(batch).clone() for _ in range(2)], before)
    again = make_runner(device, lambda x: x * 3, [2, 4], pool=good.pool)
    x = randn(4, WIDTH, device=device)
    assert same(again.run({"x": x}), x * 3)


def test_random_numbers_stand_where_they_stood_after_a_failed_capture(device):
    torch.manual_seed(3)
    wanted = torch.rand(4, device=device)
    torch.manual_seed(3)
    make_runner(device, lambda x: item(torch.rand_like(x)), [2], capture=False).capture(progress=False)
    assert same(torch.rand(4, device=device), wanted)


def test_a_failure_behind_a_boundary_leaves_everything_clean(device):
    @eager_boundary
    def attend(h):
        return h * 2

    runner = make_runner(device, lambda x: item(attend(x + 1)), [2], mode=GraphMode.PIECEWISE, capture=False)
    runner.capture(progress=False)
    assert HERE in str(runner.report().failures)
    x = randn(2, WIDTH, device=device)
    assert same(attend(x), x * 2)
    assert works(device)


def test_a_graphed_function_that_reads_a_value_still_gives_the_right_answer(device):
    f = graphed(item, ladder=[2, 4])
    for n in (1, 3, 5):
        x = randn(n, WIDTH, device=device, seed=n)
        assert same(f(x), item(x))
    assert f.report().replays == 0
    assert sum(f.report().eager_steps.values()) == 3
    assert works(device)


def test_an_ordinary_error_of_the_step_is_raised_as_it_is(device):
    def broken(x):
        return x @ torch.zeros(3, 3, device=device)

    runner = make_runner(device, broken, [2], options=CaptureOptions(strict=True, warmups=0), capture=False)
    with pytest.raises(RuntimeError, match=r"shape|size") as caught:
        runner.capture(progress=False)
    assert not isinstance(caught.value, CaptureError)
    assert works(device)
