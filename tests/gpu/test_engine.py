"""The engine on CUDA: token for token what transformers says, in every graph mode, from replayed graphs."""

from dataclasses import replace

import pytest
import torch

from engine.conftest import TinyModel, prompts_of
from engine.expected_steps import Setup, service_of
from engine.test_engine_greedy import (
    LENGTHS,
    MODES,
    assert_right_and_replayed,
    found_in_cache,
    served,
    test_families,  # noqa: F401
)
from ostinato import LLM, SamplingParams

SETUP = Setup(token_rungs=(8, 16, 32), budget=32, length=128, pages=64, ahead=1)


@pytest.fixture(scope="module", params=["Llama", "Qwen3"])
def model(request, tmp_path_factory):
    pytest.importorskip("transformers")
    extra = {"head_dim": 16} if request.param == "Qwen3" else {}
    return TinyModel(tmp_path_factory.mktemp(request.param), request.param, **extra)


@pytest.mark.parametrize("mode", MODES)
def test_greedy_output_equals_transformers_in_every_mode(model, mode, device):
    setup = replace(SETUP, mode=mode)
    prompts = prompts_of(LENGTHS)
    with LLM(model.directory, device="cuda", dtype="float32", **setup.options) as llm:
        assert_right_and_replayed(llm, setup, model, prompts)
        # Again one by one, and once more together: full pages are found in the prefix cache.
        hits = found_in_cache(prompts)
        for prompt, hit in zip(prompts, hits, strict=True):
            assert_right_and_replayed(llm, setup, model, [prompt], [hit])
        assert_right_and_replayed(llm, setup, model, prompts, hits)
        assert served(llm) == MODES[mode]


@pytest.mark.parametrize("ahead", [0, 1])
@pytest.mark.parametrize("mode", ["full", "full-and-piecewise"])
def test_preemption_changes_nothing(model, mode, ahead, device):
    setup = Setup(mode=mode, pages=7, caching=False, ahead=ahead)
    with LLM(model.directory, device="cuda", dtype="float32", **setup.options) as llm:
        prompts = prompts_of((30, 28, 31, 14, 29), seed=8)
        outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=12))
        for prompt, output in zip(prompts, outputs, strict=True):
            assert output.outputs[0].token_ids == model.greedy(tuple(prompt["prompt_token_ids"]), 12)
        assert llm.engine.core.scheduler.num_preemptions > 0
        assert served(llm) == MODES[mode]
        if not ahead:
            steps = setup.steps([len(prompt["prompt_token_ids"]) for prompt in prompts], 12)
            assert service_of(llm) == setup.service(steps)


def test_graphs_and_eager_agree_bit_for_bit_in_bf16_at_an_equal_padded_shape(model, device):
    options = {"max_running_requests": 4, "chunked_prefill_size": 32, "max_model_len": 128, "num_pages": 64}
    with LLM(model.directory, device="cuda", dtype="bfloat16", **options) as llm:
        llm.generate(prompts_of([5, 9]), SamplingParams(temperature=0, max_tokens=8))
        runner = llm.engine.core.runner.graphs
        inputs = runner.buffers.views(
            max(key.descriptor for key in runner.graphs if key.descriptor.is_uniform)
        )
        assert all(view.is_cuda for view in inputs.values())
        for graph in runner.graphs.values():
            if graph.key.mode.value != "full":
                continue
            runner.buffers.fill_padding(graph.descriptor)
            views = runner.buffers.views(graph.descriptor)
            with torch.no_grad():
                eager = runner.step(**runner.arguments(views, graph.descriptor)).clone()
                runner.launch(graph)
            torch.cuda.synchronize()
            assert torch.equal(graph.leaves[0], eager), graph.descriptor
