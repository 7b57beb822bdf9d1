"""`LLM.verify` on CUDA: whole models pass, and the faults of `planted_faults` are found there, too."""

import gc
import json
import re

import pytest
import torch

from engine.conftest import prompts_of
from engine.model_shapes import config_of
from engine.planted_faults import PLANTED, move_a_weight
from engine.test_verify import engine, state_of
from ostinato import LLM, SamplingParams
from ostinato.graphs import VerifyError

from .conftest import share_of_the_gpu

OPTIONS = {
    "device": "cuda",
    "dtype": "bfloat16",
    "chunked_prefill_size": 64,
    "cuda_graph_prefill_tokens": (16, 64),
    # Longer than any made request: what a planted fault moves one position on is still inside all tables.
    "max_model_len": 2048,
    "num_pages": 300,
}
SMALL = ("qwen3-0.6b", "llama-3.2-1b")


def small(name):
    return config_of(name, scaled=True)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("name", SMALL)
def test_right_graphs_pass(name, dtype, tmp_path, device):
    with engine(tmp_path, small(name), **{**OPTIONS, "dtype": dtype}) as llm:
        outcome = llm.verify()
        print(outcome, dict(outcome.rounding))
        assert {"rows decode 64x1", "full decode 4x1", "full mixed 64 tokens/4 reqs"} <= set(
            outcome.by_graph()
        )


@pytest.mark.parametrize("mode", ["piecewise", "full-and-piecewise", "full-decode-only"])
def test_right_graphs_pass_in_every_mode(mode, tmp_path, device):
    with engine(tmp_path, small("qwen3-0.6b"), **OPTIONS, cuda_graph_mode=mode) as llm:
        llm.verify(seed=2)


@pytest.mark.parametrize("fault", PLANTED)
def test_a_planted_fault_is_found(fault, tmp_path, monkeypatch, device):
    plant, named = PLANTED[fault]
    plant(monkeypatch)
    with engine(tmp_path, small("llama-3.2-1b"), **OPTIONS) as llm:
        with pytest.raises(VerifyError, match=named):
            llm.verify()


def test_a_moved_weight_is_found_and_no_graph_is_launched(tmp_path, device):
    with engine(tmp_path, small("llama-3.2-1b"), **OPTIONS) as llm:
        name = move_a_weight(llm)
        with pytest.raises(VerifyError, match=r"full decode 4x1.*" + re.escape(name)):
            llm.verify()


def test_everything_is_as_before(tmp_path, device):
    prompts = prompts_of((40, 21, 33), vocabulary=1009)
    params = [
        SamplingParams(temperature=0, max_tokens=8),
        SamplingParams(temperature=1, seed=4, max_tokens=8),
        SamplingParams(temperature=1, seed=5, top_p=0.8, presence_penalty=1.0, max_tokens=8, logprobs=2),
    ]
    with engine(tmp_path, small("llama-3.2-1b"), **OPTIONS, batch_invariant=False) as llm:
        llm.generate(prompts, params)
        first = llm.generate(prompts, params)
        torch.cuda.synchronize()
        before = state_of(llm)
        llm.verify()
        for name, tensor in state_of(llm).items():
            assert torch.equal(before[name], tensor), name
        second = llm.generate(prompts, params)
        assert [output.num_cached_tokens for output in second] == [32, 16, 32]
        for one, other in zip(first, second, strict=True):
            assert one.outputs[0].token_ids == other.outputs[0].token_ids


@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", ["qwen3-0.6b", "llama-3.2-1b", "llama-3.1-8b"])
def test_whole_models_pass(name, tmp_path, device):
    (tmp_path / "config.json").write_text(json.dumps(config_of(name, scaled=False)))
    gc.collect()
    torch.cuda.empty_cache()
    with LLM(str(tmp_path), device="cuda", dtype="bfloat16", load_format="dummy") as llm:
        outcome = llm.verify()
        print(outcome, dict(outcome.rounding))
        errors = {what: max(c.error for c in outcome.checks if c.what == what) for what in ("logits", "kv")}
        print(name, f"{outcome.seconds:.1f} s", errors)
        assert len(outcome.by_graph()) >= len(llm.graph_report().graphs) + 3
        if share_of_the_gpu() == 1:
            assert outcome.seconds < 60
