"""Windows on CUDA: answers longer than the cache, and kernels that never read what was given back."""

import pytest
import torch

from engine.conftest import TinyModel, prompts_of
from engine.test_windows import OPTIONS, assert_greedy
from kernels.fused_checks import check_attend_qkv
from kernels.window_cases import beginnings_gone
from ostinato import LLM, SamplingParams


@pytest.mark.parametrize("ahead", [0, 1])
def test_an_answer_longer_than_the_whole_cache(tmp_path, ahead, device):
    pytest.importorskip("transformers")
    model = TinyModel(tmp_path, "Mistral", sliding_window=24, max_position_embeddings=512, head_dim=16)
    prompts = prompts_of((60, 5), seed=2)
    options = {**OPTIONS, "device": "cuda", "dtype": "float32", "num_pages": 22, "steps_ahead": ahead}
    with LLM(model.directory, **options) as llm:
        for count in (400, 30):
            params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
            outputs = llm.generate(prompts, params)
            for prompt, output in zip(prompts, outputs, strict=True):
                assert_greedy(model, prompt["prompt_token_ids"], output.outputs[0].token_ids, count)
        assert llm.engine.core.scheduler.pages.num_free == 21
        assert llm.graph_report().eager_steps == {}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [1, 50, 700])
@pytest.mark.parametrize(
    ("requests", "longest"),
    [([(1500, 1), (900, 1), (7, 1)], 1), ([(1500, 1), (1300, 19), (9, 9), (1277, 200)], 256)],
    ids=["decode", "mixed"],
)
def test_kernels_read_windows_only(requests, longest, window, dtype, device):
    """Page 0, which stands for what was given back, is full of NaN."""
    with beginnings_gone(window):
        check_attend_qkv(
            "cuda", dtype, requests, (8, 2, 128), norm=True, max_query_len=longest, window=window
        )
