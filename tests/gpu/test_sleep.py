"""An engine on CUDA that sleeps and wakes: the device gets its memory back, the graphs stay and are right."""

import gc
from pathlib import Path

import pytest
import torch

from engine.conftest import TinyModel, prompts_of
from engine.test_sleep import *  # noqa: F403
from engine.test_sleep import OPTIONS, graphs_of
from memory.known_numbers import free_bytes, leave_garbage
from ostinato import LLM, SamplingParams
from ostinato.memory import SaverMemoryError
from ostinato.models.weights import checkpoint_tensors

pytest.importorskip("cuda.bindings.driver")

MODELS = Path(__file__).parents[2] / "benchmarks" / "models"
MIB = 1 << 20

# Contents that spoil a step end a CUDA context with it; resident memory is the host's.
del test_contents_in_the_wrong_class_are_found_by_wrong_tokens  # noqa: F821
del test_the_process_gives_back_what_the_report_says  # noqa: F821


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    pytest.importorskip("transformers")
    return TinyModel(tmp_path_factory.mktemp("llama"), "Llama")


@pytest.mark.alone
@pytest.mark.parametrize("mode", ["full", "full-and-piecewise"])
def test_a_real_shape_gives_its_memory_back_twenty_times_and_says_the_same(device, mode):
    """Qwen3-0.6B with random weights, other ones after every wake, everything sampled and filtered that has a
    graph of its own. Engines that were started with these weights say the same."""
    options = {"load_format": "dummy", "num_pages": 2000, "max_model_len": 4096, "cuda_graph_mode": mode}
    asleep = {"enable_sleep_mode": True, "hostile_wake": True}
    prompts = prompts_of((7, 300, 33, 1200, 64, 3), vocabulary=150_000)
    asked = [
        SamplingParams(temperature=0, max_tokens=24, ignore_eos=True),
        SamplingParams(temperature=0.8, top_p=0.9, seed=5, max_tokens=24, ignore_eos=True),
        SamplingParams(temperature=0.8, repetition_penalty=1.2, seed=6, max_tokens=24, ignore_eos=True),
    ] * 2

    def tokens(engine):
        return [output.outputs[0].token_ids for output in engine.generate(prompts, asked, use_tqdm=False)]

    wanted, weights = {}, {}
    for seed in (1, 2):
        with LLM(str(MODELS / "qwen3-0.6b"), progress=False, seed=seed, **options) as fresh:
            wanted[seed] = tokens(fresh)
            views = checkpoint_tensors(fresh.engine.core.loaded.model)
            weights[seed] = {name: view.cpu() for name, view in views.items()}
            del views
    assert wanted[1] != wanted[2]
    with LLM(str(MODELS / "qwen3-0.6b"), progress=False, **options, **asleep) as engine:
        tokens(engine)
        graphs = graphs_of(engine)
        report = engine.memory_report()
        ours = sum(report[name] for name in ("weights", "kv", "inputs", "outputs", "sampling", "activations"))
        leave_garbage(device, MIB)
        engine.sleep()
        engine.wake_up()
        start = free_bytes(device)
        for cycle in range(20):
            before = free_bytes(device)
            report = engine.sleep(level=1 + cycle % 2)
            came_free = free_bytes(device) - before
            assert came_free >= 0.95 * ours, f"{came_free:,} of {ours:,} came free"
            assert abs(came_free - report.released) <= 16 * MIB
            leave_garbage(device, int(0.95 * came_free))
            engine.wake_up()
            new = 1 + cycle // 2 % 2
            assert engine.update_weights(weights[new]).missing == 0
            assert tokens(engine) == wanted[new], f"after {cycle + 1} sleeps"
        assert abs(free_bytes(device) - start) <= 32 * MIB, "it grows"
        assert all(one is other for one, other in zip(graphs_of(engine), graphs, strict=True))
        report = engine.sleep()
        taken = torch.cuda.mem_get_info(device)[1] - free_bytes(device)
        assert sum(report.stays.values()) == pytest.approx(taken, rel=0.02)


@pytest.mark.alone
def test_too_little_memory_at_wake_leaves_it_asleep_and_a_retry_works(device, tiny):
    with LLM(tiny.directory, **{**OPTIONS, "num_pages": 300_000}) as engine:
        params = SamplingParams(temperature=0, max_tokens=8)
        wanted = engine.generate(prompts_of((5, 20)), params)
        released = engine.sleep().released
        assert released > 1024 * MIB
        hog = torch.empty(free_bytes(device) - released // 2, dtype=torch.uint8, device=device)
        with pytest.raises(SaverMemoryError, match="are free"):
            engine.wake_up()
        assert engine.is_sleeping()
        del hog
        engine.wake_up()
        again = engine.generate(prompts_of((5, 20)), params)
        assert [o.outputs[0].token_ids for o in again] == [o.outputs[0].token_ids for o in wanted]


@pytest.mark.alone
def test_a_closed_engine_leaves_nothing_behind(device, tiny):
    def once():
        with LLM(tiny.directory, **{**OPTIONS, "num_pages": 100_000}) as engine:
            engine.generate(prompts_of((5, 20)), SamplingParams(temperature=0, max_tokens=8))
            engine.sleep()
            engine.wake_up()
        gc.collect()

    once()
    before = free_bytes(device)
    for _ in range(3):
        once()
    assert abs(free_bytes(device) - before) <= 16 * MIB
