"""config.json: both ways to write rope, and a named refusal of all that is not supported."""

import json
from pathlib import Path
from typing import Any

import pytest

from ostinato.models.config import ModelConfig
from ostinato.models.errors import ModelError, UnsupportedModelError
from ostinato.models.layer_kind import LayerKind
from ostinato.models.rope import RopeConfig

BASE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
LLAMA3 = {
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def config(**fields: Any) -> ModelConfig:
    return ModelConfig.from_dict({**BASE, **fields})


@pytest.mark.parametrize(
    ("fields", "rope"),
    [
        ({}, RopeConfig()),
        ({"rope_theta": 5e5, "rope_scaling": None}, RopeConfig(5e5)),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}, RopeConfig(5e5)),
        (
            {"rope_theta": 9.0, "rope_scaling": {"type": "linear", "factor": 2}},
            RopeConfig(9.0, "linear", 2.0),
        ),
        (
            {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **LLAMA3}},
            RopeConfig(5e5, "llama3", 32.0, 1.0, 4.0, 8192),
        ),
        (
            {
                "rope_scaling": {
                    "rope_type": "yarn",
                    "factor": 4,
                    "original_max_position_embeddings": 64,
                    "attention_factor": 2,
                }
            },
            RopeConfig(kind="yarn", factor=4, original_max_positions=64, attention_factor=2),
        ),
        (
            {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3}},
            RopeConfig(5e5, "llama3", 32.0, 1.0, 4.0, 8192),
        ),
    ],
)
def test_rope_is_read_in_the_old_and_the_new_style(fields: dict[str, Any], rope: RopeConfig) -> None:
    assert config(**fields).rope == rope


NEW: dict[str, Any] = {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3}}
OLD: dict[str, Any] = {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **LLAMA3}}
LINEAR = {"rope_type": "linear", "factor": 2}


@pytest.mark.parametrize("written", [NEW, OLD], ids=["new style", "old style"])
@pytest.mark.parametrize(
    ("overrides", "rope"),
    [
        ({"rope_theta": 9.0}, RopeConfig(9.0, "llama3", 32.0, 1.0, 4.0, 8192)),
        ({"rope_scaling": LINEAR}, RopeConfig(5e5, "linear", 2.0)),
        ({"rope_parameters": LINEAR}, RopeConfig(5e5, "linear", 2.0)),
        ({"rope_parameters": {**LINEAR, "rope_theta": 9.0}}, RopeConfig(9.0, "linear", 2.0)),
        ({"rope_theta": 9.0, "rope_scaling": LINEAR}, RopeConfig(9.0, "linear", 2.0)),
        ({"rope_scaling": None}, RopeConfig(5e5)),
        ({"rope_parameters": {}}, RopeConfig(5e5)),
    ],
    ids=str,
)
def test_overrides_of_rope_act_in_whichever_style_they_and_the_file_are(
    written: dict[str, Any],
    overrides: dict[str, Any],
    rope: RopeConfig,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**BASE, **written}))
    assert ModelConfig.load(tmp_path, overrides).rope == rope
    assert "no effect" not in caplog.text


@pytest.mark.parametrize(
    ("rope", "longest"),
    [
        ({"rope_type": "default"}, 4096),
        ({"rope_type": "linear", "factor": 4.0}, 16384),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048}, 8192),
        ({"rope_type": "llama3", **LLAMA3}, 4096),
    ],
)
def test_a_context_is_as_long_as_its_positions_are_stretched(rope: dict[str, Any], longest: int) -> None:
    """max_position_embeddings is the length before, but for Llama 3's, as vLLM has it."""
    assert config(max_position_embeddings=4096, rope_scaling=rope).max_position_embeddings == longest


def test_two_styles_at_once_must_agree() -> None:
    assert config(**NEW, rope_scaling={"type": "llama3", **LLAMA3}).rope == config(**NEW).rope
    with pytest.raises(ModelError, match="rope_parameters and rope_scaling contradict each other"):
        config(rope_parameters={"rope_type": "default", "rope_theta": 5e5}, rope_scaling=LINEAR)


def test_families_differ_in_what_they_imply() -> None:
    llama = config(attention_bias=True, mlp_bias=True, torch_dtype="bfloat16")
    assert llama.layers == (LayerKind(qkv_bias=True, output_bias=True, mlp_bias=True),) * 4
    assert (llama.head_dim, llama.dtype) == (16, "bfloat16")
    qwen2 = config(architectures=["Qwen2ForCausalLM"], sliding_window=8, use_sliding_window=False)
    assert qwen2.layers == (LayerKind(qkv_bias=True),) * 4
    qwen3 = config(architectures=["Qwen3ForCausalLM"])
    assert (qwen3.head_dim, qwen3.layers) == (128, (LayerKind(qk_norm=True),) * 4)
    mistral = config(architectures=["MistralForCausalLM"], sliding_window=8, head_dim=None)
    assert (mistral.layer_windows, mistral.head_dim) == ((8,) * 4, 16)


def test_windows_that_a_file_does_not_name_are_those_of_transformers() -> None:
    for family, usual in (("Mistral", (4096,) * 4), ("Qwen2", (None, 4096, 4096, 4096))):
        fields = {
            "architectures": [f"{family}ForCausalLM"],
            "use_sliding_window": True,
            "max_window_layers": 1,
        }
        assert config(**fields).layer_windows == usual
        assert config(**fields, sliding_window=None).layer_windows == (None,) * 4


def test_qwen_windows_start_at_a_layer_or_are_listed() -> None:
    fields = {"architectures": ["Qwen2ForCausalLM"], "use_sliding_window": True, "sliding_window": 8}
    assert config(**fields, max_window_layers=3).layer_windows == (None, None, None, 8)
    types = ["sliding_attention", "full_attention"] * 2
    assert config(**fields, layer_types=types).layer_windows == (8, None, 8, None)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, r"GPT2LMHeadModel is not supported; .*Qwen3ForCausalLM"),
        ({"architectures": None, "model_type": "bert"}, r"'bert' without an architecture .*LlamaForCausalLM"),
        ({"num_local_experts": 8}, r"mixture of experts \(num_local_experts=8\)"),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 4}}, r"'longrope' is not supported; .*llama3"),
        (
            {"rope_scaling": {"rope_type": "yarn", "factor": 4, "mscale": 1.0}},
            "yarn with mscale is not supported",
        ),
        ({"rope_parameters": {"full": {"rope_type": "default"}}}, "differ between layers"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
        ({"hidden_act": "gelu"}, "'gelu' is not supported"),
        ({"is_causal": False}, r"attention to later tokens too \(is_causal false\) is not supported"),
        ({"quantization_config": {"quant_method": "awq"}}, "'awq'"),
        ({"dtype": "float8_e4m3fn"}, "float8_e4m3fn"),
        (
            {
                "architectures": ["Qwen3ForCausalLM"],
                "use_sliding_window": True,
                "sliding_window": 8,
                "layer_types": ["chunked_attention"] * 4,
            },
            "chunked_attention",
        ),
    ],
)
def test_what_cannot_run_is_refused_by_name(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        config(**fields)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"vocab_size": -1}, "vocab_size must be a positive number, not -1"),
        ({"num_hidden_layers": 2.5}, "num_hidden_layers must be a whole number"),
        ({"num_key_value_heads": 3}, "not a multiple of num_key_value_heads 3"),
        ({"hidden_size": 66}, "without head_dim, hidden_size 66 must be a multiple"),
        ({"head_dim": 15}, "head_dim 15 is odd"),
        ({"rope_scaling": {"rope_type": "linear"}}, "factor is missing"),
        ({"rope_scaling": {"rope_type": "llama3", **LLAMA3, "low_freq_factor": 4.0}}, "must be less than"),
    ],
)
def test_a_wrong_field_is_named(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        config(**fields)


def test_files_that_are_no_config_are_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"config\.json does not exist"):
        ModelConfig.load(tmp_path)
    file = tmp_path / "config.json"
    file.write_text("{")
    with pytest.raises(ModelError, match=r"config\.json is not valid JSON"):
        ModelConfig.load(file)
    file.write_text("[]")
    with pytest.raises(ModelError, match="contains a list"):
        ModelConfig.load(file)
    file.write_text(json.dumps({**BASE, "architectures": ["MixtralForCausalLM"]}))
    with pytest.raises(UnsupportedModelError, match=r"config\.json: architecture MixtralForCausalLM"):
        ModelConfig.load(file)


ABSURD = [0, -1, 1e30, 10**400, float("nan"), float("inf"), "64", True, [1], {}]
SIZES = [
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "head_dim", "max_position_embeddings", "rms_norm_eps", "sliding_window"),
]


@pytest.mark.parametrize("field", SIZES)
def test_absurd_sizes_are_refused_by_name(field: str) -> None:
    """Before memory is taken, in one sentence of readable length."""
    fields = {"architectures": ["MistralForCausalLM"]} if field == "sliding_window" else {}
    for value in ABSURD:
        with pytest.raises(ModelError, match=field) as refused:
            config(**fields, **{field: value})
        assert len(str(refused.value)) < 200


@pytest.mark.parametrize("value", ABSURD)
def test_absurd_stretching_is_refused(value: Any) -> None:
    for kind in ("linear", "yarn", "llama3"):
        scaling = {"rope_type": kind, **LLAMA3, "factor": value}
        with pytest.raises(ModelError, match=r"factor|rope parameters"):
            config(rope_parameters=scaling)
    if not isinstance(value, int) or isinstance(value, bool):
        with pytest.raises(ModelError, match="max_window_layers"):
            config(architectures=["Qwen2ForCausalLM"], use_sliding_window=True, max_window_layers=value)
    with pytest.raises(ModelError):
        config(architectures=["Qwen2ForCausalLM"], use_sliding_window=True, layer_types=value)


def test_a_context_stretched_beyond_all_numbers_is_refused() -> None:
    scaling = {"rope_type": "linear", "factor": 1e6}
    with pytest.raises(ModelError, match="factor"):
        config(rope_parameters=scaling, max_position_embeddings=2**30)
