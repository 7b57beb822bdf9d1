"""Attention between pieces of a graph, of requests whose lengths the host does not know yet."""

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
