"""Adapters again on CUDA: in graphs, from kernels, a step ahead; and in real shapes."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from engine.conftest import prompts_of, tiny, tiny_text  # noqa: F401
from engine.test_lora import *  # noqa: F403
from ostinato import LLM, LoRARequest, SamplingParams
from ostinato.models.adapters.reading import adaptable
from ostinato.models.weights import checkpoint_tensors

MODELS = Path(__file__).parents[2] / "benchmarks" / "models"
OPTIONS = {
    "load_format": "dummy",
    "num_pages": 600,
    "max_model_len": 512,
    "max_running_requests": 64,
    "cuda_graph_bs": (1, 4, 16, 64),
    "cuda_graph_prefill_tokens": (64, 512),
    "chunked_prefill_size": 512,
    "progress": False,
}


def _write(llm: LLM, directory: Path, seed: int, rank: int) -> dict[str, torch.Tensor]:
    """A random adapter of all layers; what it adds to each weight, in float32."""
    model = llm.engine.core.loaded.model
    generator = torch.Generator("cuda").manual_seed(seed)
    tensors, deltas, kinds = {}, {}, set()
    for name, linear in adaptable(model).items():
        rows = linear.parts or (linear.weight.size(0),)
        for layer, num_rows in zip(model.config.family.tensors.of(name), rows, strict=True):
            inner = linear.weight.size(1)
            a = torch.randn(rank, inner, generator=generator, device="cuda") * inner**-0.5
            b = torch.randn(num_rows, rank, generator=generator, device="cuda") * 0.05
            tensors[f"base_model.model.{layer}.lora_A.weight"] = a.cpu()
            tensors[f"base_model.model.{layer}.lora_B.weight"] = b.cpu()
            deltas[f"{layer}.weight"] = 2 * b @ a
            kinds.add(layer.rpartition(".")[2])
    directory.mkdir()
    save_file(tensors, directory / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": sorted(kinds)}
    (directory / "adapter_config.json").write_text(json.dumps(config))
    return deltas


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_real_shapes_answer_as_engines_with_merged_weights(tmp_path, dtype):
    """Three adapters and none over one batch, in every form of a step; references have the sum of weights."""
    prompts = prompts_of((5, 300, 33, 120, 64, 3, 17, 200) * 2, vocabulary=150_000)
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=10)
    model = str(MODELS / "qwen3-0.6b")
    of_lora = {"enable_lora": True, "max_loras": 3, "max_lora_rank": 16}
    with LLM(model, dtype=dtype, **of_lora, **OPTIONS) as llm:
        deltas = [_write(llm, tmp_path / str(at), at, (16, 8, 5)[at]) for at in range(3)]
        asked = [LoRARequest(str(at), at + 1, str(tmp_path / str(at))) for at in range(3)]
        each = [None, *asked] * 4
        found = llm.generate(prompts, params, lora_request=each)
        alone = [llm.generate([prompts[at]], params, lora_request=[each[at]])[0] for at in range(8)]
        report = llm.graph_report()
        assert not report.eager_steps
        assert sum(g.replays for g in report.graphs if "lora" in str(g.descriptor)) > 12
    for kind in (None, 0, 1, 2):
        with LLM(model, dtype=dtype, **OPTIONS) as reference:
            if kind is not None:
                weights = checkpoint_tensors(reference.engine.core.loaded.model)
                new = {key: weights[key].float() + delta for key, delta in deltas[kind].items()}
                reference.update_weights({key: value.to(weights[key].dtype) for key, value in new.items()})
            own = [at for at in range(16) if each[at] is (None if kind is None else asked[kind])]
            wanted = reference.generate([prompts[at] for at in own], params)
        outputs = [(found[at], right) for at, right in zip(own, wanted, strict=True)]
        outputs += [(alone[at], right) for at, right in zip(own, wanted, strict=True) if at < 8]
        equal = sum(one.outputs[0].token_ids == right.outputs[0].token_ids for one, right in outputs)
        # Random weights: now and then two tokens are as likely as float32 can tell.
        assert dtype != "float32" or equal >= 0.9 * len(outputs)
        for output, right in outputs:
            mine, theirs = output.outputs[0].logprobs[0], right.outputs[0].logprobs[0]
            common = mine.keys() & theirs.keys()
            assert len(common) >= 5
            worst = max(abs(mine[token].logprob - theirs[token].logprob) for token in common)
            assert worst < (1e-2 if dtype == "float32" else 0.3), (kind, worst)


def test_base_requests_have_the_bits_of_an_engine_without(tmp_path):
    """In a batch without adapters: the graphs are the same."""
    prompts = prompts_of((5, 300, 33, 120), vocabulary=150_000)
    params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, logprobs=5)
    model = str(MODELS / "qwen3-0.6b")
    found = []
    for more in ({}, {"enable_lora": True}):
        with LLM(model, **OPTIONS, **more) as llm:
            found.append([output.outputs[0].logprobs for output in llm.generate(prompts, params)])
    assert found[0] == found[1]
