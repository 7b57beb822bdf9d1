"""Training loops as people write them, from graphs and plainly: the same losses, rates and parameters."""

import pytest
import torch

from contract.training_programs import PROGRAMS, PlainStep
from ostinato.graphs import CaptureOptions, graphed_train_step

QUICK = {
    "gan_of_two_steps",
    "vae_with_warm_up",
    "contrastive_with_a_queue",
    "checkpoint_and_resume",
    "curriculum_of_batches",
    "plateau_and_early_stopping",
}
EAGER = {("ctc", "cpu"): "capture-failed"}
"""Programs that no graph can serve on a device, and the reason."""


@pytest.mark.parametrize(
    "name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in PROGRAMS]
)
def test_a_loop_trains_what_it_trains_without_graphs(device, name):
    steps = []

    def graphed(*args, **settings):
        steps.append(graphed_train_step(*args, options=CaptureOptions(freeze_gc=False), **settings))
        return steps[-1]

    found, ours = PROGRAMS[name](graphed, device)
    expected, theirs = PROGRAMS[name](PlainStep, device)
    tolerance = 1e-3 if device.type == "cuda" else 1e-5
    assert [float(each) for each in found] == pytest.approx(
        [float(each) for each in expected], rel=tolerance, abs=tolerance / 10
    )
    for one, other in zip(ours, theirs, strict=True):
        for key, value in one.state_dict().items():
            torch.testing.assert_close(value, other.state_dict()[key], rtol=tolerance, atol=tolerance)
    for step in steps:
        report = step.report()
        if (name, device.type) in EAGER:
            assert EAGER[name, device.type] in report.eager_steps
        else:
            assert not report.failures
            assert any(row.replays for row in report.graphs)
