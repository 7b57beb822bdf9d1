"""Programs as people write them do from graphs what they do without.

`python -m corpus` from tests/ runs all of them and prints a table."""

import pytest

from corpus.registry import all_programs, run_program

PROGRAMS = all_programs()

QUICK = [
    "mlp, each result used at once",
]


def check(name, device):
    result = run_program(PROGRAMS[name], str(device))
    if result.overwritten_only:
        pytest.xfail("keeps a result beyond the next call, which overwrites it")
    assert result.outcome not in ("wrong", "crashed"), [*result.differences, result.error]
    assert result.alarms == []
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
    from corpus.registry import Program

    def wrong(world):
        model = [world.randn(3)]
        world.watch(model)
        yield model[0] * (2 if world.graphs else 3)

    def held(world):
        kept = world.randn(3)
        yield kept
        kept.add_(float(world.graphs))

    def crashed(world):
        yield world.randn(3)
        if world.graphs:
            raise RuntimeError("only here")

    def right(world):
        yield world.randn(3)
        world.attempt(lambda: world.randn(3) @ world.randn(4))

    outcomes = {
        body: run_program(Program("own", (), body), str(device)).outcome for body in (wrong, held, crashed)
    }
    assert outcomes == {wrong: "wrong", held: "wrong", crashed: "crashed"}
    assert run_program(Program("own", (), right), str(device)).outcome == "right"
