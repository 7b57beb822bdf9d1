"""A step that fails anywhere takes its own requests along and nobody else; rows it has touched serve others.

Requests of all kinds decode beside prompts, share pages, are preempted and join while one launch
fails at one line of its code. All others get the tokens of an undisturbed run, and so do those that come
after it into the same rows.
"""

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch

from ostinato.engine.llm import LLM
from ostinato.engine.outputs import RequestOutput
from ostinato.engine.parameters.sampling_params import SamplingParams, StructuredOutputs
from ostinato.engine.stepping.device_rows import RESERVED_CELLS, DeviceRows

from .conftest import TinyModel, prompts_of, write_byte_tokenizer
from .interrupted_launch import Launches, Point
from .test_engine_greedy import assert_all_back
from .test_plain_sampling import counts


class Arrival(NamedTuple):
    turn: int
    prompt: dict[str, list[int]]
    params: SamplingParams


def arrivals_of(waves: dict[int, list[tuple[int, dict[str, Any]]]]) -> list[Arrival]:
    """Requests by the turn in which they arrive: the length of the prompt, and what is asked."""
    found = []
    for turn, wave in waves.items():
        for at, (length, asked) in enumerate(wave):
            [prompt] = prompts_of([length], seed=100 * turn + at // 2)  # two of a kind have equal pages
            params = SamplingParams(**{"max_tokens": 9, "ignore_eos": True, "temperature": 0, **asked})
            found.append(Arrival(turn, prompt, params))
    return found


DIGITS = {"structured_outputs": StructuredOutputs(regex="[0-9]{30}")}
LETTERS = {"structured_outputs": StructuredOutputs(regex="[a-f]{30}"), "logit_bias": {70: 3.0}}
PENALTY = {"seed": 8, "temperature": 1.0, "frequency_penalty": 0.9, "repetition_penalty": 1.3}
BIAS = {"logit_bias": {5: 6.0, 9: 6.5}, "logprobs": 1}
BANNED = {"min_tokens": 4, "stop_token_ids": [7, 9, 11]}
WORDS = {"bad_words": [[5, 9], [7], [9, 5, 3]], "allowed_token_ids": [3, 5, 7, 9]}
DRAWN = {"seed": 3, "temperature": 0.8}
FILTERED = {"seed": 5, "temperature": 1.2, "top_k": 9}
SCENES: dict[str, tuple[dict[str, Any], list[Arrival]]] = {
    # The first ones need a page each while prompts of the second wave are computed.
    "prompts": (
        {"num_pages": 90, "max_running_requests": 8},
        arrivals_of(
            {
                0: [(13, DIGITS), (13, PENALTY), (13, {}), (13, DRAWN)],
                6: [(16, BIAS), (16, DRAWN), (16, FILTERED)],
                14: [(17, {}), (9, LETTERS), (16, DIGITS), (5, BANNED), (3, WORDS)],
            }
        ),
    ),
    # Pages are few, and the youngest are preempted.
    "preemption": (
        {"num_pages": 8, "max_running_requests": 5},
        arrivals_of(
            {
                0: [(14, DRAWN), (13, DIGITS), (15, PENALTY), (14, BIAS)],
                5: [(16, FILTERED), (20, {}), (4, LETTERS)],
            }
        ),
    ),
}
MAIN = ("_launch", "send")
"""Functions of whose lines more are tried in the fast command."""
SMALL: dict[str, Any] = {
    "max_model_len": 64,
    "chunked_prefill_size": 16,
    "cuda_graph_prefill_tokens": [8, 16],
    "cuda_graph_bs": [1, 5],
    "enable_cudagraph_gc": True,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    directory: Path = tmp_path_factory.mktemp("one-layer")
    model = TinyModel(directory, "Llama", num_hidden_layers=1)
    write_byte_tokenizer(directory)
    return model


def serve(llm: LLM, arrivals: list[Arrival]) -> list[RequestOutput]:
    """All of them, whatever interrupts it."""
    engine, outputs = llm.engine, list[RequestOutput]()
    llm.engine.core.scheduler.flush_prefix_cache()
    last = arrivals[-1].turn
    for turn in itertools.count():
        outputs += [engine.add(it.prompt, it.params) for it in arrivals if it.turn == turn]
        if turn > last and not engine.has_work:
            return outputs
        assert turn < 2000, "requests starve"  # a turn may be a short wait for a grammar
        try:
            engine.step()
        except (KeyboardInterrupt, RuntimeError):
            engine.core.scheduler.check_integrity()
    raise AssertionError


def tokens_of(outputs: list[RequestOutput]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


def undisturbed(llm: LLM, arrivals: list[Arrival]) -> list[list[int]]:
    """What all of them get."""
    # Grammars are compiled beside the steps; here everybody is to arrive in the turn that is given.
    llm.generate([arrivals[0].prompt] * 2, [SamplingParams(**DIGITS), SamplingParams(**LETTERS)])
    return tokens_of(serve(llm, arrivals))


def check_survivors(outputs: list[RequestOutput], wanted: list[list[int]], error: BaseException) -> int:
    """Who ended as without the failure has the same tokens; how many did not."""
    failed = 0
    for at, (output, tokens) in enumerate(zip(outputs, wanted, strict=True)):
        found = output.outputs[0].token_ids
        assert output.finished
        if output.error is None:
            assert found == tokens, f"request {at} goes on with other tokens"
            continue
        failed += 1
        assert str(error) in output.error
        assert found == tokens[: len(found)], f"request {at} had other tokens before it failed"
    return failed


def check_mirror(rows: DeviceRows) -> None:
    """What the host takes the device to have is there."""
    known, cells = torch.from_numpy(rows._mirror.copy()), rows.cells.cpu()
    for name, field in rows._fields.items():
        if field.advances:
            begin = rows._starts[name]
            end = begin + rows[name].nbytes // 4
            known[begin:end] = cells[begin:end]
    if rows._changes:  # nobody was left to need it
        unsent = rows._changes.places()
        known[unsent] = cells[unsent]
    differing = (known != cells)[RESERVED_CELLS:].nonzero()
    assert not len(differing), f"{len(differing)} cells of the rows are not what the host takes them for"


def cases() -> Iterator[Any]:
    """Every mode, lookahead and scene. A line is tried in two of them; in the fast command one in 600 is,
    but one in 60 of those that say what a launch is."""
    fast = [("full", 1, "prompts"), ("none", 0, "preemption")]
    for turn, setup in enumerate(fast):
        yield pytest.param(*setup, turn, 60, 600, id="-".join(map(str, setup)))
    setups = itertools.product(("full", "none", "full-and-piecewise"), (1, 0), SCENES)
    for turn, setup in enumerate(setups):
        name = "-".join(map(str, (*setup, "thorough")))
        yield pytest.param(*setup, turn % 6, 6, 6, id=name, marks=pytest.mark.slow)


@pytest.mark.parametrize(("mode", "ahead", "scene", "turn", "main", "rest"), list(cases()))
def test_whatever_line_of_a_launch_fails_all_others_get_their_tokens(
    model: TinyModel, mode: str, ahead: int, scene: str, turn: int, main: int, rest: int
) -> None:
    """Of the main lines one in `main` is tried, of the others one in `rest`, beginning with number `turn`."""
    options, arrivals = SCENES[scene]
    with LLM(model.directory, cuda_graph_mode=mode, steps_ahead=ahead, **{**SMALL, **options}) as llm:
        core = llm.engine.core
        wanted = undisturbed(llm, arrivals)
        launches = Launches(core)
        with launches.watched():
            assert tokens_of(serve(llm, arrivals)) == wanted
        assert (core.scheduler.num_preemptions > 0) == (scene == "preemption")
        faults = list(faults_of(launches.points))
        assert len(faults) > 300
        mains = [fault for fault in faults if fault[1].function in MAIN]
        others = [fault for fault in faults if fault[1].function not in MAIN]
        tried, num_reached, num_failed = [*mains[turn::main], *others[turn::rest]], 0, 0
        for number, (launch, point) in enumerate(tried):
            error = (RuntimeError, KeyboardInterrupt)[number % 2](f"at {point.function}:{point.line}")
            with launches.failing(launch, point, error):
                outputs = serve(llm, arrivals)
            # What rows have from earlier tenants is not written again, so that some lines are not come by.
            num_reached += launches.has_failed
            num_failed += check_survivors(outputs, wanted, error)
            assert_all_back(llm)
            check_mirror(core.runner.rows)
        assert num_reached > 0.8 * len(tried)
        assert num_failed >= num_reached
        assert tokens_of(serve(llm, arrivals)) == wanted
        on_device, on_host = counts(llm)
        assert on_device == on_host > 0


LANDINGS = ("_complete", "_take_in", "_booked", "complete", "progress")
"""Functions of whose lines more are tried in the fast command."""


THOROUGH = (pytest.mark.slow, pytest.mark.timeout(1200))


def landings() -> Iterator[Any]:
    """As `cases`, for what is done with the tokens of a step."""
    fast = [("full", 1, "prompts"), ("none", 0, "preemption")]
    for turn, setup in enumerate(fast):
        yield pytest.param(*setup, turn, 72, 360, id="-".join(map(str, setup)))
    for turn, setup in enumerate(itertools.product(("full", "none"), (1, 0), SCENES)):
        name = "-".join(map(str, (*setup, "thorough")))
        yield pytest.param(*setup, turn % 4, 4, 4, id=name, marks=THOROUGH)


@pytest.mark.parametrize(("mode", "ahead", "scene", "turn", "main", "rest"), list(landings()))
def test_whatever_line_fails_where_a_step_lands_all_others_get_their_tokens(
    model: TinyModel, mode: str, ahead: int, scene: str, turn: int, main: int, rest: int
) -> None:
    """The books of scheduler, pages and prefixes included: they are made anew for those who go on."""
    options, arrivals = SCENES[scene]
    with LLM(model.directory, cuda_graph_mode=mode, steps_ahead=ahead, **{**SMALL, **options}) as llm:
        core = llm.engine.core
        wanted = undisturbed(llm, arrivals)
        steps = Launches(core, "_complete")
        with steps.watched():
            assert tokens_of(serve(llm, arrivals)) == wanted
        faults = list(faults_of(steps.points))
        assert len(faults) > 150
        mains = [fault for fault in faults if fault[1].function in LANDINGS]
        others = [fault for fault in faults if fault[1].function not in LANDINGS]
        tried, num_reached, num_failed = [*mains[turn::main], *others[turn::rest]], 0, 0
        for number, (landing, point) in enumerate(tried):
            error = (RuntimeError, KeyboardInterrupt)[number % 2](f"at {point.function}:{point.line}")
            with steps.failing(landing, point, error):
                outputs = serve(llm, arrivals)
            num_reached += steps.has_failed
            failed = check_survivors(outputs, wanted, error)
            assert failed < len(outputs), "it takes everybody along"
            num_failed += failed
            assert_all_back(llm)
            check_mirror(core.runner.rows)
        assert num_reached > 0.8 * len(tried)
        assert num_failed > 0.5 * num_reached
        assert tokens_of(serve(llm, arrivals)) == wanted


@pytest.mark.parametrize("rest", [480, pytest.param(2, marks=THOROUGH)], ids=["some", "thorough"])
@pytest.mark.parametrize("scene", SCENES)
def test_whatever_line_of_the_scheduler_fails_all_end_and_the_next_are_served(
    model: TinyModel, scene: str, rest: int
) -> None:
    options, arrivals = SCENES[scene]
    with LLM(model.directory, cuda_graph_mode="full", **{**SMALL, **options}) as llm:
        core = llm.engine.core
        wanted = undisturbed(llm, arrivals)
        steps = Launches(core, "_schedule")
        with steps.watched():
            assert tokens_of(serve(llm, arrivals)) == wanted
        for number, (turn, point) in enumerate(list(faults_of(steps.points))[::rest]):
            error = (RuntimeError, KeyboardInterrupt)[number % 2](f"at {point.function}:{point.line}")
            with steps.failing(turn, point, error):
                outputs = serve(llm, arrivals)
            for output, tokens in zip(outputs, wanted, strict=True):
                found = output.outputs[0].token_ids
                assert output.finished
                assert found == tokens[: len(found)] if output.error else found == tokens
            assert_all_back(llm)
        assert tokens_of(serve(llm, arrivals)) == wanted


def faults_of(points: list[list[Point]]) -> Iterator[tuple[int, Point]]:
    """Each point once in the launches of the second wave and once in those after it."""
    for launches in (range(6, 11), range(11, 17)):
        seen: set[Point] = set()
        for launch in launches:
            new = dict.fromkeys(point for point in points[launch] if point not in seen)
            seen.update(new)
            yield from ((launch, point) for point in new)


@pytest.mark.parametrize("error", [MemoryError, KeyboardInterrupt])
def test_what_is_only_tidied_up_behind_a_launch_takes_nobody_along(
    model: TinyModel, error: type[BaseException], caplog: pytest.LogCaptureFixture
) -> None:
    """An interrupt there goes to whoever called, and the step under way stays under way."""
    options, arrivals = SCENES["prompts"]
    with LLM(model.directory, cuda_graph_mode="full", steps_ahead=1, **{**SMALL, **options}) as llm:
        wanted = undisturbed(llm, arrivals)
        failures = itertools.cycle([error, None, None])
        pages = llm.engine.core.scheduler.pages
        with patch.object(pages, "catch_up", side_effect=failures) as catch_up:
            outputs = serve(llm, arrivals)
        assert catch_up.call_count > 10
        assert tokens_of(outputs) == wanted
        assert not [output.error for output in outputs if output.error]
        assert ("could not be indexed in blocks" in caplog.text) == (error is MemoryError)
        assert_all_back(llm)
