"""The default model with its real weights, and its own first layers as the draft."""

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from engine.test_engine_smollm2 import PROMPTS, needs_model
from ostinato.engine.llm import LLM
from ostinato.engine.parameters.sampling_params import SamplingParams
from ostinato.models.locate import locate_model

LAYERS = 24
OPTIONS: dict[str, Any] = {
    "max_model_len": 160,
    "max_running_requests": 4,
    "chunked_prefill_size": 64,
    "cuda_graph_bs": (1, 4),
    "cuda_graph_prefill_tokens": (64,),
}


def first_layers(folder: Path) -> str:
    """A copy with fewer layers."""
    whole = locate_model()
    config = json.loads((whole / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": LAYERS}))
    weights = load_file(whole / "model.safetensors")
    kept = {
        name: tensor
        for name, tensor in weights.items()
        if "layers." not in name or int(name.split("layers.")[1].split(".")[0]) < LAYERS
    }
    save_file(kept, folder / "model.safetensors")
    return str(folder)


@needs_model
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_greedy_tokens_are_those_without_drafts(tmp_path: Path) -> None:
    greedy = [SamplingParams(temperature=0, max_tokens=count) for count in (24, 16, 9)]
    asked = {"method": "draft_model", "model": first_layers(tmp_path), "num_speculative_tokens": 3}
    with LLM(**OPTIONS) as llm:
        expected = [
            output.outputs[0].token_ids for output in llm.generate(PROMPTS[:3], greedy, use_tqdm=False)
        ]
    for mode in ("full-and-piecewise", "none"):
        more = {"cuda_graph_mode": mode, "speculative_config": {**asked, "disable_adaptive": True}}
        with LLM(**OPTIONS, **more) as llm:
            outputs = llm.generate(PROMPTS[:3], greedy, use_tqdm=False)
            assert [output.outputs[0].token_ids for output in outputs] == expected, mode
            alone = llm.generate(PROMPTS[0], greedy[0], use_tqdm=False)
            assert alone[0].outputs[0].token_ids == expected[0], mode
            report = llm.speculation_report()
            assert report is not None
            assert all(report.drafts.accepted_per_position), mode
