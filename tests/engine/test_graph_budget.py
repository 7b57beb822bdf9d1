"""An engine whose graphs may take little memory: it keeps to it, says what it gave up, and serves."""

import pytest

from ostinato import LLM, SamplingParams

from .conftest import TinyModel, prompts_of

OPTIONS = {
    "dtype": "float32",
    "max_model_len": 128,
    "max_running_requests": 4,
    "chunked_prefill_size": 2048,
    "cuda_graph_bs": (4,),
    "cuda_graph_prefill_tokens": (64, 2048),
    "enable_cudagraph_gc": True,
    "progress": False,
}
MIB = 1 << 20


def test_the_graphs_keep_to_their_budget_and_the_rest_runs_without(tiny: TinyModel) -> None:
    params = SamplingParams(temperature=0, max_tokens=6)
    prompts = prompts_of((5, 90, 100))
    with LLM(tiny.directory, **OPTIONS) as roomy:
        wanted = [output.outputs[0].token_ids for output in roomy.generate(prompts, params)]
        assert roomy.memory_report()["activations"] > 2 * MIB
    with LLM(tiny.directory, cuda_graph_memory_mb=1, enable_sleep_mode=True, **OPTIONS) as llm:
        report = llm.graph_report()
        assert 0 < llm.memory_report()["activations"] == report.pool_bytes <= 1.05 * MIB
        assert [row.num_tokens for row in report.graphs] == [64, 4]
        [(shed, cause)] = report.failures.items()
        assert "2048 tokens" in shed
        assert "budget of 1,048,576 bytes" in cause
        predicted = sum(row.predicted_bytes or 0 for row in report.graphs)
        assert predicted == pytest.approx(sum(row.bytes for row in report.graphs), rel=0.15)
        assert [output.outputs[0].token_ids for output in llm.generate(prompts, params)] == wanted
        assert set(llm.graph_report().eager_steps) == {"out-of-memory"}
