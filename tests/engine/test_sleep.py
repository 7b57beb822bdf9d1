"""An engine that sleeps and wakes: the same graphs, the right tokens, no lost request.

Everything runs with hostile fills: whatever is not restored comes back as NaNs and large integers.
"""

import asyncio
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from memory.test_cpu import failing, resident_bytes
from ostinato.engine.async_llm import AsyncLLM
from ostinato.engine.llm import LLM
from ostinato.engine.loading.saved_memory import SavedMemory
from ostinato.engine.parameters.sampling_params import RequestError, SamplingParams
from ostinato.engine.sleeping.sleeper import EngineAsleepError
from ostinato.graphs import ConfigError
from ostinato.memory import Content, SaverMemoryError
from ostinato.models.weights import checkpoint_tensors

from .conftest import TinyModel, prompts_of
from .test_engine_greedy import MODES, SMALL

GREEDY = SamplingParams(temperature=0, max_tokens=8)
OPTIONS: dict[str, Any] = {
    **SMALL,
    "dtype": "float32",
    "progress": False,
    "enable_sleep_mode": True,
    "hostile_wake": True,
}
PROMPTS = prompts_of((3, 21, 17))


@pytest.fixture(scope="module")
def sleepy(tiny: TinyModel) -> Iterator[LLM]:
    with LLM(tiny.directory, **OPTIONS) as llm:
        yield llm


@pytest.fixture
def llm(sleepy: LLM) -> Iterator[LLM]:
    yield sleepy
    sleepy.wake_up()
    assert sleepy.engine.core.sleeper.why_no_weights is None
    assert not sleepy.engine.has_work, "a request was left behind"
    sleepy.engine.core.scheduler.check_integrity()


def assert_right(llm: LLM, tiny: TinyModel, prompts: list[dict[str, list[int]]] = PROMPTS) -> None:
    for prompt, output in zip(prompts, llm.generate(prompts, GREEDY), strict=True):
        assert output.outputs[0].token_ids == tiny.greedy(tuple(prompt["prompt_token_ids"]), 8)


def graphs_of(llm: LLM) -> list[object]:
    core = llm.engine.core
    runners = [core.runner.graphs, core.runner.rows.scatter, *core.sampler.graphs.values()]
    return [graph for runner in runners for graph in runner.graphs.values()]


# -- memory and tokens -----------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
def test_the_same_graphs_give_the_right_tokens_after_every_sleep(tiny, mode):
    with LLM(tiny.directory, cuda_graph_mode=mode, **OPTIONS) as llm:
        assert_right(llm, tiny)
        graphs = graphs_of(llm)
        for _ in range(2):
            report = llm.sleep()
            assert report.tags == ("weights", "kv_cache", "graphs")
            assert report.released >= sum(p.nbytes for p in llm.engine.core.loaded.model.parameters())
            assert llm.is_sleeping()
            assert llm.wake_up().taken == report.released
            assert not llm.is_sleeping()
            assert_right(llm, tiny)
        assert all(one is other for one, other in zip(graphs_of(llm), graphs, strict=True))
        assert not llm.graph_report().failures
        assert set(llm.graph_report().eager_steps) == MODES[mode][1]


def test_all_lasting_memory_is_in_its_class(llm):
    core = llm.engine.core
    saver, runner, sampler = core.loaded.memory.saver, core.runner, core.sampler
    of = saver.kind_of
    assert {of(parameter) for parameter in runner.model.parameters()} == {("weights", Content.DATA)}
    assert {of(buffer) for buffer in runner.model.buffers()} == {("weights", Content.ONCE)}
    assert {of(tensor) for tensor in runner.kv.named_tensors().values()} == {("kv_cache", Content.SCRATCH)}
    static = [
        runner.logits,
        runner.hidden,
        runner.began,
        runner._one_token_each,
        runner.returned.lines.counts,
    ]
    static += [
        sampler.generated,
        sampler._asked_rows.in_prompt,
        sampler._masks.tensor,
        runner.graphs.buffers.arena,
    ]
    assert {of(tensor) for tensor in static} == {("graphs", Content.ONCE)}
    intermediates = runner.pool.bytes - runner.pool.bytes_beside
    assert saver.bytes()["graphs"][Content.SCRATCH].mapped >= intermediates > 0


def spoil_rotary_tables(patch):
    real = SavedMemory.take_over_buffers

    def as_scratch(memory, model):
        with pytest.MonkeyPatch.context() as inner:
            empty = memory.saver.empty
            inner.setattr(memory.saver, "empty", lambda *asked: empty(*asked[:-1], "scratch"))
            real(memory, model)

    patch.setattr(SavedMemory, "take_over_buffers", as_scratch)


def spoil_static_buffers(patch):
    patch.setattr(SavedMemory, "static_buffers", lambda memory: memory.saver.region("graphs", "scratch"))


@pytest.mark.parametrize("spoil", [spoil_rotary_tables, spoil_static_buffers])
def test_contents_in_the_wrong_class_are_found_by_wrong_tokens(tiny, spoil):
    with pytest.MonkeyPatch.context() as patch:
        spoil(patch)
        llm = LLM(tiny.directory, **OPTIONS)
    assert_right(llm, tiny)
    llm.sleep()
    llm.wake_up()
    with pytest.raises((AssertionError, RequestError, RuntimeError, IndexError)):
        assert_right(llm, tiny)


def test_the_process_gives_back_what_the_report_says(tiny):
    options = {**OPTIONS, "num_pages": 20_000, "hostile_wake": False}
    with LLM(tiny.directory, **options) as llm:
        before = resident_bytes()
        report = llm.sleep()
        assert report.released > 40 << 20
        assert before - resident_bytes() >= 0.9 * report.released
        llm.wake_up()
        assert_right(llm, tiny)


def test_tags_wake_one_at_a_time_and_steps_wait_for_the_last(llm, tiny):
    llm.sleep()
    for tags in (["weights"], ["graphs"]):
        assert llm.wake_up(tags).tags == tuple(tags)
        assert llm.is_sleeping()
        with pytest.raises(EngineAsleepError, match=r"released: .*kv_cache"):
            llm.generate(PROMPTS, GREEDY)
        with pytest.raises(EngineAsleepError, match="wake_up"):
            llm.verify()
    assert llm.wake_up(["kv_cache"]).tags == ("kv_cache",)
    assert not llm.is_sleeping()
    assert_right(llm, tiny)
    llm.sleep()
    llm.wake_up(["kv_cache"])
    assert llm.wake_up(["weights"]).tags == ("weights",), "graphs came with the KV cache"
    assert not llm.is_sleeping()
    assert_right(llm, tiny)


def test_no_prefix_is_found_that_was_computed_before(llm, tiny):
    prompt = prompts_of((40,), seed=7)
    assert_right(llm, tiny, prompt)
    assert llm.generate(prompt, GREEDY)[0].num_cached_tokens == 32
    llm.sleep()
    llm.wake_up()
    [output] = llm.generate(prompt, GREEDY)
    assert output.num_cached_tokens == 0
    assert output.outputs[0].token_ids == tiny.greedy(tuple(prompt[0]["prompt_token_ids"]), 8)
    assert_right(llm, tiny, prompt)


def test_dropped_weights_are_refused_until_there_are_new_ones(llm, tiny):
    views = checkpoint_tensors(llm.engine.core.loaded.model)
    kept = {name: view.clone() for name, view in views.items()}
    report = llm.sleep(level=2)
    assert report.backed_up < report.released - sum(tensor.nbytes for tensor in kept.values())
    llm.wake_up()
    assert not llm.is_sleeping()
    with pytest.raises(EngineAsleepError, match=r"dropped by sleep\(level=2\)"):
        llm.generate(PROMPTS, GREEDY)
    assert all(view.isnan().all() for view in views.values())
    first, *others = kept
    assert llm.update_weights({first: kept[first]}).missing == len(others)
    with pytest.raises(EngineAsleepError, match="update_weights"):
        llm.generate(PROMPTS, GREEDY)
    assert llm.update_weights((name, kept[name]) for name in others).missing == 0
    assert_right(llm, tiny)


# -- requests --------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", [0, 1])
def test_requests_that_are_kept_go_on_where_they_were(llm, tiny, level):
    long = SamplingParams(temperature=0, max_tokens=12)
    served = [llm.engine.add(prompt, long) for prompt in prompts_of((5, 30, 9, 12, 20), seed=3)]
    for count in (1, 4, 2):
        for _ in range(count):
            llm.engine.step()
        llm.sleep(level, mode="keep")
        with pytest.raises(EngineAsleepError):
            llm.engine.step()
        llm.wake_up()
    while llm.engine.has_work:
        llm.engine.step()
    for output in served:
        assert output.outputs[0].token_ids == tiny.greedy(tuple(output.prompt_token_ids), 12)


def test_requests_are_finished_before_or_end_with_the_sleep(llm, tiny):
    first = [llm.engine.add(prompt, GREEDY) for prompt in PROMPTS]
    llm.engine.step()
    llm.sleep(mode="wait")
    assert [len(output.outputs[0].token_ids) for output in first] == [8, 8, 8]
    llm.wake_up()
    second = [llm.engine.add(prompt, GREEDY) for prompt in PROMPTS]
    for _ in range(3):
        llm.engine.step()
    llm.sleep(mode="abort")
    assert [output.outputs[0].finish_reason for output in second] == ["abort"] * 3
    llm.wake_up()
    assert_right(llm, tiny)


@pytest.mark.parametrize("mode", ["wait", "abort"])
def test_another_threads_call_gets_what_it_has_when_the_engine_falls_asleep(llm, tiny, mode):
    """It waits for its turn to take a step while the sleep ends its requests, and has to take none."""
    [prompt] = prompts_of([9], seed=1)
    wanted = tiny.greedy(tuple(prompt["prompt_token_ids"]), 50)
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(llm.generate, [prompt] * 2, SamplingParams(temperature=0, max_tokens=50))
        while len(llm.engine.core.scheduler.running) < 2 and not running.done():
            time.sleep(0.001)
        llm.sleep(mode=mode)
        for output in running.result(20):
            found = output.outputs[0].token_ids
            assert found == (wanted if mode == "wait" else wanted[: len(found)])


def test_coroutines_wait_through_a_sleep(tiny):
    async def tokens_of(llm, prompt):
        return [output async for output in llm.generate(prompt, GREEDY)][-1].outputs[0].token_ids

    async def talk():
        async with AsyncLLM(tiny.directory, **OPTIONS) as llm:
            running = [asyncio.create_task(tokens_of(llm, prompt)) for prompt in PROMPTS]
            await asyncio.sleep(0.01)
            await llm.sleep(mode="keep")
            assert await llm.is_sleeping()
            running.append(asyncio.create_task(tokens_of(llm, PROMPTS[0])))
            await asyncio.sleep(0.05)
            assert not running[-1].done()
            with pytest.raises(RequestError, match="unknown tag"):
                await llm.wake_up(["weight"])
            await llm.wake_up()
            return await asyncio.gather(*running)

    wanted = [tiny.greedy(tuple(prompt["prompt_token_ids"]), 8) for prompt in PROMPTS]
    assert asyncio.run(talk()) == [*wanted, wanted[0]]


# -- errors ----------------------------------------------------------------------------------------


def test_too_little_memory_at_wake_leaves_it_asleep_and_a_retry_works(llm, tiny):
    if llm.engine.core.config.device.type != "cpu":
        pytest.skip("the failure is planted in the mappings of a CPU")
    llm.sleep()
    with failing("protect", after=5), pytest.raises(SaverMemoryError):
        llm.wake_up()
    assert llm.is_sleeping()
    with pytest.raises(EngineAsleepError):
        llm.generate(PROMPTS, GREEDY)
    llm.wake_up()
    assert_right(llm, tiny)


def test_no_room_for_weights_leaves_it_awake(llm, tiny):
    if llm.engine.core.config.device.type != "cpu":
        pytest.skip("the failure is planted in the mappings of a CPU")
    served = llm.engine.add(PROMPTS[0], GREEDY)
    llm.engine.step()
    with failing("write", after=2), pytest.raises(SaverMemoryError):
        llm.sleep(mode="keep")
    assert not llm.is_sleeping()
    while llm.engine.has_work:
        llm.engine.step()
    assert served.outputs[0].token_ids == tiny.greedy(tuple(PROMPTS[0]["prompt_token_ids"]), 8)


def test_repeated_calls_are_harmless(llm, tiny):
    assert llm.wake_up().tags == ()
    llm.sleep()
    assert llm.sleep().released == 0
    assert llm.sleep(level=0).released == 0
    assert llm.wake_up().tags == ("weights", "kv_cache", "graphs")
    assert llm.wake_up().tags == ()
    llm.sleep(level=0)
    assert llm.is_sleeping()
    llm.wake_up(["scheduling"])
    assert not llm.is_sleeping()
    assert_right(llm, tiny)


def test_mistakes_are_named(llm, tiny):
    for call, message in (
        (lambda: llm.sleep(3), "unknown sleep level 3: use 0, 1, 2"),
        (lambda: llm.sleep(1, "now"), "unknown mode 'now': use abort, wait, keep"),
        (lambda: llm.wake_up(["cuda_graph"]), "unknown tag 'cuda_graph'"),
        (lambda: llm.wake_up("weights"), r"tags must be a list.*\['weights'\]"),
    ):
        with pytest.raises(RequestError, match=message):
            call()
    with pytest.raises(ConfigError, match="needs enable_sleep_mode"):
        LLM(tiny.directory, hostile_wake=True)
    assert not llm.is_sleeping()


def test_an_engine_without_sleep_mode_knows_level_0_and_allocates_as_ever(tiny):
    options = {**OPTIONS, "enable_sleep_mode": False, "hostile_wake": False}
    with LLM(tiny.directory, **options) as llm:
        assert llm.engine.core.loaded.memory is None
        with pytest.raises(RequestError, match="enable_sleep_mode=True"):
            llm.sleep()
        llm.sleep(level=0)
        with pytest.raises(EngineAsleepError, match="asleep: call wake_up"):
            llm.generate(PROMPTS, GREEDY)
        llm.wake_up()
        assert_right(llm, tiny)


def test_an_engine_can_be_closed_in_its_sleep(tiny):
    llm = LLM(tiny.directory, **OPTIONS)
    llm.engine.add(PROMPTS[0], GREEDY)
    llm.engine.step()
    llm.sleep(mode="keep")
    llm.close()
    with pytest.raises(RequestError, match="closed"):
        llm.wake_up()
