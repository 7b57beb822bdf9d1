"""Few tokens of one prompt behind a cached prefix on CUDA: their kernel, and the graphs for one request."""

import pytest
import torch

from engine.conftest import TinyModel, prompts_of
from kernels import fused_checks
from ostinato import LLM, SamplingParams

QWEN = (16, 8, 128)


@pytest.mark.parametrize("length", [16, 17, 1024, 8190, 32_768])
@pytest.mark.parametrize("count", [1, 5, 16])
def test_attention_of_the_end_of_a_prompt(device, length, count):
    fused_checks.check_equal_places(device, torch.bfloat16, [(length, count)], 16, QWEN, norm=True)


@pytest.mark.parametrize("family", ["Llama", "Qwen3"])
def test_they_run_from_graphs_for_one_request_that_are_right(tmp_path, family, device):
    pytest.importorskip("transformers")
    model = TinyModel(tmp_path, family, head_dim=16)
    options = {"max_model_len": 128, "max_running_requests": 4, "num_pages": 80, "cuda_graph_bs": (1, 4)}
    options |= {"cuda_graph_prefill_tokens": (4, 8, 64), "chunked_prefill_size": 64}
    [prefix, *own] = [prompt["prompt_token_ids"] for prompt in prompts_of((64, 1, 8, 3, 5), seed=5)]
    with LLM(model.directory, device="cuda", dtype="bfloat16", **options) as llm:
        params = SamplingParams(temperature=0, max_tokens=1)
        for end in own:
            [output] = llm.generate([{"prompt_token_ids": prefix + end}], params)
        assert output.num_cached_tokens == len(prefix)
        served = {row.descriptor: row.replays for row in llm.graph_report().graphs}
        assert (served["mixed 4 tokens/1 reqs"], served["mixed 8 tokens/1 reqs"]) == (2, 2)
        assert not llm.graph_report().eager_steps
        llm.verify(progress=False)
