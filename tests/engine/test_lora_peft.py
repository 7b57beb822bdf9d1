"""Adapters that PEFT itself has made and saved, against the models that it makes of merging them."""

import copy
from pathlib import Path
from typing import Any

import pytest

from ostinato import LLM, LoRARequest, SamplingParams

from .conftest import TinyModel, prompts_of
from .greedy_reference import assert_greedy

KINDS: dict[str, dict[str, Any]] = {
    "plain": {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]},
    "rslora": {"r": 8, "lora_alpha": 4, "target_modules": "all-linear", "use_rslora": True},
    "patterns": {
        "r": 3,
        "lora_alpha": 6,
        "target_modules": r".*\.(k_proj|o_proj|gate_proj)",
        "rank_pattern": {"o_proj": 6},
        "alpha_pattern": {"model.layers.1.mlp.gate_proj": 17},
    },
    "one layer": {"r": 2, "target_modules": ["up_proj", "down_proj"], "layers_to_transform": [1]},
    "excluded": {
        "r": 2,
        "target_modules": ["v_proj"],
        "exclude_modules": ["model.layers.0.self_attn.v_proj"],
    },
}


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_what_peft_saves_is_served_as_what_it_merges(tiny: TinyModel, tmp_path: Path) -> None:
    # Not before it is needed: it takes seconds to import.
    peft = pytest.importorskip("peft", reason="in the dev extra")
    asked, merged = [], []
    for number, (name, config) in enumerate(KINDS.items()):
        options = peft.LoraConfig(init_lora_weights=False, **config)
        model = peft.get_peft_model(copy.deepcopy(tiny.reference), options)
        for parameter in model.parameters():
            parameter.requires_grad_(False)
        model.save_pretrained(tmp_path / name)
        asked.append(LoRARequest(name, number + 1, str(tmp_path / name)))
        merged.append(model.merge_and_unload())
    prompts = prompts_of([5, 9, 21, 3, 30, 12], seed=12)
    params = SamplingParams(temperature=0, max_tokens=10)
    small = {"max_running_requests": 4, "num_pages": 40, "cuda_graph_bs": (4,)}
    with LLM(
        tiny.directory, enable_lora=True, max_lora_rank=8, cuda_graph_prefill_tokens=(32,), **small
    ) as llm:
        outputs = llm.generate(prompts, params, lora_request=[*asked, None])
    for prompt, output, model in zip(prompts, outputs, [*merged, tiny.reference], strict=True):
        assert output.error is None
        assert_greedy(model, prompt["prompt_token_ids"], output.outputs[0].token_ids)
    for prompt, output in zip(prompts[:5], outputs[:5], strict=True):
        plain = tiny.greedy(tuple(prompt["prompt_token_ids"]), 10)
        assert output.outputs[0].token_ids != plain, output
