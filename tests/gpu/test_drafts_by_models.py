"""Drafts by models again on CUDA: walks, chains against a naive loop, and real shapes in float32."""

import json
from pathlib import Path
from typing import Any

import pytest

from engine.conftest import prompts_of
from engine.speculating.test_draft_chain import chains, test_drafts_are_those_of_a_naive_loop  # noqa: F401
from engine.speculating.test_drafts_by_models import *  # noqa: F403
from ostinato import LLM, SamplingParams

MODELS = Path(__file__).parents[2] / "benchmarks" / "models"
OPTIONS: dict[str, Any] = {
    "load_format": "dummy",
    "dtype": "float32",
    "num_pages": 200,
    "max_model_len": 256,
    "max_running_requests": 8,
    "cuda_graph_bs": (1, 8),
    "cuda_graph_prefill_tokens": (128,),
    "chunked_prefill_size": 128,
    "progress": False,
}


def shallow(folder: Path, name: str, **changes: Any) -> str:
    """The shape of a real model, with few layers."""
    config = json.loads((MODELS / name / "config.json").read_text())
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**config, **changes}))
    return str(folder)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    place = tmp_path_factory.mktemp("shapes")
    eagle3 = {
        "num_hidden_layers": 1,
        "architectures": ["LlamaForCausalLMEagle3"],
        "draft_vocab_size": 32000,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2, 4]},
    }
    return {
        "target": shallow(place / "target", "llama-3.1-8b", num_hidden_layers=5),
        # The same weights as the target: all drafts are accepted, as far as numbers agree.
        "draft_model": shallow(place / "same", "llama-3.1-8b", num_hidden_layers=5),
        "eagle": shallow(place / "eagle", "llama-3.1-8b", num_hidden_layers=1),
        "eagle3": shallow(place / "eagle3", "llama-3.1-8b", **eagle3),
    }


def test_greedy_tokens_in_real_shapes_are_those_without_drafts(folders: dict[str, str]) -> None:
    prompts = prompts_of((5, 60, 17, 130, 33, 8))
    greedy = SamplingParams(temperature=0, max_tokens=48, ignore_eos=True)
    with LLM(folders["target"], **OPTIONS) as llm:
        expected = [output.outputs[0].token_ids for output in llm.generate(prompts, greedy)]
        alone = llm.generate(prompts[0], greedy)[0].outputs[0].token_ids
    for method in ("draft_model", "eagle", "eagle3"):
        asked = {"method": method, "model": folders[method], "num_speculative_tokens": 4}
        with LLM(folders["target"], speculative_config={**asked, "disable_adaptive": True}, **OPTIONS) as llm:
            assert [output.outputs[0].token_ids for output in llm.generate(prompts, greedy)] == expected, (
                method
            )
            assert llm.generate(prompts[0], greedy)[0].outputs[0].token_ids == alone, method
            report = llm.speculation_report()
            assert report is not None
            assert not report.eager_drafts, method
            if method == "draft_model":
                assert report.drafts.mean_acceptance_length > 4.5
