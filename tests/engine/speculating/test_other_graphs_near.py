"""Steps with drafts where graphs of other steps are near: pieces with attention between them, more rungs."""

from pathlib import Path
from typing import Any

from engine.conftest import prompts_of
from models.small_models import saved_model
from ostinato.engine.llm import LLM
from ostinato.engine.parameters.sampling_params import SamplingParams


def test_prompts_beside_drafts_see_their_own_context(tmp_path: Path) -> None:
    """A batch is one object for all replays of a graph; what attention once found out about it is not."""
    saved_model("llama", tmp_path)
    options: dict[str, Any] = {"max_model_len": 64, "max_running_requests": 5, "chunked_prefill_size": 16}
    options |= {
        "cuda_graph_bs": (5,),
        "cuda_graph_prefill_tokens": (8, 16),
        "num_pages": 30,
        "steps_ahead": 1,
    }
    prompts = prompts_of((3, 2, 7, 20, 1, 5), vocabulary=97)
    greedy = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    asked = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 2, "disable_adaptive": True}
    texts = []
    for more in ({}, {"speculative_config": asked}):
        with LLM(str(tmp_path), cuda_graph_mode="piecewise", **options, **more) as llm:
            outputs = llm.generate(prompts, greedy, use_tqdm=False)
            texts.append([output.outputs[0].token_ids for output in outputs])
    assert texts[0] == texts[1]


def test_a_batch_between_rungs_is_verified_by_a_graph_for_that(tmp_path: Path) -> None:
    """3 x 5 tokens would fit a graph of 16 tokens for prompts, which is smaller than 5 x 5; and whoever asks
    for filters is served at the very size of the step before."""
    saved_model("llama", tmp_path)
    options: dict[str, Any] = {"max_model_len": 64, "max_running_requests": 5, "chunked_prefill_size": 16}
    options |= {"cuda_graph_bs": (5,), "cuda_graph_prefill_tokens": (16,), "num_pages": 30, "steps_ahead": 1}
    prompts = prompts_of((3, 2, 7), vocabulary=97)
    params = [
        SamplingParams(temperature=heat, top_k=top_k, seed=4, max_tokens=8, ignore_eos=True)
        for heat, top_k in ((0.0, 0), (0.9, 5), (0.9, 0))
    ]
    asked = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 2, "disable_adaptive": True}
    texts = []
    for more in ({}, {"speculative_config": asked}):
        with LLM(str(tmp_path), cuda_graph_mode="full", **options, **more) as llm:
            outputs = llm.generate(prompts, params, use_tqdm=False)
            texts.append([output.outputs[0].token_ids for output in outputs])
            report = llm.speculation_report()
    assert texts[0] == texts[1]
    assert report is not None
    assert not report.eager_acceptance
