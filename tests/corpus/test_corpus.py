"""Programs as people write them do from graphs what they do without.

`python -m corpus` from tests/ runs all of them and prints a table."""

import pytest

from corpus.registry import Program, all_programs, run_program

PROGRAMS = all_programs()

QUICK = [
    "mlp, each result used at once",
    "a callable object with state_dict of its own",
    "an activation replaced after the capture",
    "arguments of different batch sizes broadcast",
    "cached property of a module",
    "evaluation that returns a mean loss",
    "feature flags in a module-level dictionary",
    "inputs made in inference mode",
    "numpy arrays as arguments",
    "rnn that keeps its hidden state in an attribute",
    "state in a buffer, calls from two threads in turns",
    "weights loaded, pruned and frozen after the capture",
    "training: a gpt of several lengths",
    "training: accumulation with a shorter last one",
    "training: batches of different sizes with a ladder",
    "training: checkpoint saved and loaded in the middle",
    "training: soft actor critic with a learned temperature",
]

DIFFERENT: dict[str, str] = {}
"""What replays do differently, and why."""


def check(name, device):
    result = run_program(PROGRAMS[name], str(device))
    if result.outcome in ("wrong", "crashed") and name in DIFFERENT:
        pytest.xfail(DIFFERENT[name])
    assert result.outcome not in ("wrong", "crashed"), [*result.differences, result.error]
    assert result.alarms == [], "a right program is called unhealthy"
    if result.outcome in ("refused", "raised-by-name"):
        assert result.reasons or result.error, "a refusal has a reason"


@pytest.mark.parametrize("name", QUICK)
def test_a_program_does_the_same_from_graphs(name, device):
    check(name, device)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in PROGRAMS if name not in QUICK])
def test_every_program_does_the_same_from_graphs(name, device):
    check(name, device)


def test_a_difference_is_seen(device):
    """The corpus itself: it calls a wrong program wrong."""

    def wrong(world):
        yield world.randn(3) * (2 if world.graphs else 3)

    def changed(world):
        state = {"weight": world.randn(3)}
        world.watch(state)
        state["weight"] = state["weight"] + world.graphs

    def held(world):
        kept = world.randn(3)
        yield kept * 1
        yield kept
        world.shown[0].add_(float(world.graphs))

    def crashed(world):
        yield world.randn(3)
        if world.graphs:
            raise RuntimeError("only here")

    def silent(world):
        yield world.randn(3)
        if not world.graphs:
            raise RuntimeError("only eager")

    def broken(world):
        yield world.randn(3) @ world.randn(4)

    def right(world):
        yield world.randn(3)
        world.attempt(lambda: world.randn(3) @ world.randn(4))

    def outcome(body):
        return run_program(Program("own", (), body), str(device)).outcome

    assert [outcome(body) for body in (wrong, changed, held, silent)] == ["wrong"] * 4
    assert [outcome(body) for body in (crashed, broken, right)] == ["crashed", "crashed", "right"]
