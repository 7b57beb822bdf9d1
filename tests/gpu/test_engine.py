"""The engine on CUDA: token for token what transformers says, in every graph mode, from replayed graphs."""

import pytest
import torch

from engine.conftest import TinyModel, prompts_of
from ostinato import LLM, SamplingParams

# The tape's reasons do not apply here: a mode serves exactly these steps eagerly.
EAGER_REASONS = {
    "none": {"disabled"},
    "full-decode-only": {"mixed-batch"},
    "piecewise": set(),
    "full": set(),
    "full-and-piecewise": set(),
}


@pytest.fixture(scope="module", params=["Llama", "Qwen3"])
def model(request, tmp_path_factory):
    pytest.importorskip("transformers")
    extra = {"head_dim": 16} if request.param == "Qwen3" else {}
    return TinyModel(tmp_path_factory.mktemp(request.param), request.param, **extra)


@pytest.mark.parametrize("mode", list(EAGER_REASONS))
def test_greedy_output_equals_transformers_in_every_mode(model, mode, device):
    prompts = prompts_of([3, 17, 1, 40, 9])
    options = {"max_running_requests": 4, "chunked_prefill_size": 32, "max_model_len": 128, "num_pages": 64}
    with LLM(model.directory, device="cuda", dtype="float32", cuda_graph_mode=mode, **options) as llm:
        outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=12))
        report = llm.graph_report()
        for prompt, output in zip(prompts, outputs, strict=True):
            assert output.outputs[0].token_ids == model.greedy(tuple(prompt["prompt_token_ids"]), 12)
        assert set(report.eager_steps) == EAGER_REASONS[mode]
        assert (report.replays > 0) == (mode != "none")


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
