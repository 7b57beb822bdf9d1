"""The last layer of a long prompt goes on with the last tokens alone, on CUDA: as whole layers answer."""

from unittest.mock import patch

import pytest

from engine.conftest import TinyModel, prompts_of
from models.small_adapters import write_adapter
from ostinato import LLM, LoRARequest, SamplingParams
from ostinato.engine.stepping import planned_graphs

LENGTHS = (1500, 700, 30, 2500, 1030, 9, 900)
OPTIONS = {
    "max_model_len": 3000,
    "max_running_requests": 16,
    "chunked_prefill_size": 2048,
    "cuda_graph_bs": (1, 4, 16),
    "cuda_graph_prefill_tokens": (64, 1024, 1536, 2048),
    "num_pages": 1200,
}
FIELDS = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 3, "initializer_range": 0.1}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}


@pytest.mark.parametrize("family", ["Llama", "Qwen3"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_answers_are_those_of_whole_layers(tmp_path, family, dtype, device):
    pytest.importorskip("transformers")
    model = TinyModel(tmp_path, family, **FIELDS, **HEADS, max_position_embeddings=4096)
    prompts, params = prompts_of(LENGTHS), SamplingParams(temperature=0, max_tokens=4, logprobs=5)
    found = []
    for least in (planned_graphs._LEAST_TOKENS, 1 << 30):
        with (
            patch.object(planned_graphs, "_LEAST_TOKENS", least),
            LLM(model.directory, device="cuda", dtype=dtype, **OPTIONS) as llm,
        ):
            found.append(llm.generate(prompts, params, use_tqdm=False))
            report = llm.graph_report()
            short = [row.replays for row in report.graphs if "last tokens" in row.descriptor]
            assert bool(sum(short)) == (least < 1 << 30)
            assert report.eager_steps == {}
            if short:
                assert len(short) == 3
                assert llm.verify(progress=False).passed
    tolerance = 1e-3 if dtype == "float32" else 0.15
    for ours, whole in zip(*found, strict=True):
        first, wanted = (output.outputs[0].logprobs[0] for output in (ours, whole))
        shared = set(first) & set(wanted)
        assert len(shared) >= 4
        for token in shared:
            assert first[token].logprob == pytest.approx(wanted[token].logprob, abs=tolerance)
        if dtype == "float32":
            assert ours.outputs[0].token_ids == whole.outputs[0].token_ids


def test_with_adapters(tmp_path, device):
    """Those of the last tokens; a step with all of them, and with none."""
    pytest.importorskip("transformers")
    model = TinyModel(tmp_path / "model", "Llama", **FIELDS, **HEADS, max_position_embeddings=4096)
    for n in (1, 2):
        write_adapter(tmp_path / f"a{n}", model.reference, seed=n)
    requests = [None, *(LoRARequest(f"a{n}", n, str(tmp_path / f"a{n}")) for n in (1, 2))]
    asked = [requests[n % 3] for n in range(len(LENGTHS))]
    found = []
    for least in (planned_graphs._LEAST_TOKENS, 1 << 30):
        options = {**OPTIONS, "enable_lora": True, "max_loras": 2, "dtype": "float32", "device": "cuda"}
        with patch.object(planned_graphs, "_LEAST_TOKENS", least), LLM(model.directory, **options) as llm:
            params = SamplingParams(temperature=0, max_tokens=4)
            outputs = llm.generate(prompts_of(LENGTHS), params, lora_request=asked, use_tqdm=False)
            found.append([output.outputs[0].token_ids for output in outputs])
            assert llm.graph_report().eager_steps == {}
    assert found[0] == found[1]
