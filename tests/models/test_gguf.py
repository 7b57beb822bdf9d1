"""GGUF files give the model they were made from, once through the cache, or a refusal by name."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from ostinato.models import gguf as conversion
from ostinato.models.errors import ModelError, UnsupportedModelError, WeightsError
from ostinato.models.gguf import convert_gguf
from ostinato.models.layers import inverse_frequencies
from ostinato.models.rope import RopeConfig
from ostinato.models.weights import checkpoint_tensors, load_model
from ostinato.text.errors import TokenizerError
from ostinato.text.tokenizer import Tokenizer
from text.small_tokenizers import gguf_metadata

from .small_gguf import write_gguf
from .small_models import all_logits, reference_model

IDS = torch.randint(0, 97, (30,), generator=torch.Generator().manual_seed(5))


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("OSTINATO_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.mark.parametrize(
    "family", ["llama", "llama-tied", "llama-biases", "mistral", "qwen2", "qwen3", "qwen3-biases-tied"]
)
def test_a_plain_gguf_gives_the_same_logits(family: str, tmp_path: Path) -> None:
    reference = reference_model(family)
    directory = convert_gguf(write_gguf(reference, tmp_path / "model.gguf"))
    model = load_model(directory, dtype=torch.float32)
    assert (all_logits(model, IDS) - reference(IDS[None]).logits[0]).abs().max() < 2e-4
    tokenizer = Tokenizer.from_directory(directory)
    assert tokenizer.eos_token_ids == (2,)
    assert tokenizer.decode(tokenizer.encode("lazy dogs")) == "lazy dogs"


@pytest.mark.parametrize("name", ["F16", "BF16", "Q8_0"])
def test_other_types_are_near_and_stored_in_half_the_bytes(name: str, tmp_path: Path) -> None:
    reference = reference_model("llama", hidden_size=96, intermediate_size=96)
    kind = gguf.GGMLQuantizationType[name]
    directory = convert_gguf(write_gguf(reference, tmp_path / "model.gguf", quantisation=kind))
    model = load_model(directory, dtype=torch.float32)
    expected = reference.state_dict()
    for key, tensor in checkpoint_tensors(model).items():
        assert (tensor - expected[key]).abs().max() < 0.02, key
    parameters = sum(parameter.numel() for parameter in model.parameters())
    assert (directory / "model.safetensors").stat().st_size < 2.3 * parameters


def test_llama3_frequencies_are_recognised(tmp_path: Path) -> None:
    rope = {
        "rope_type": "llama3",
        "rope_theta": 5e5,
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    reference = reference_model("llama", head_dim=32, rope_parameters=rope)
    ours = RopeConfig(5e5, "llama3", 32.0, 1.0, 4.0, 8192)
    factors = (inverse_frequencies(RopeConfig(5e5), 32) / inverse_frequencies(ours, 32)).numpy()
    file = write_gguf(reference, tmp_path / "model.gguf", extra={"rope_freqs.weight": factors})
    model = load_model(convert_gguf(file), dtype=torch.float32)
    assert model.config.rope == ours
    assert (all_logits(model, IDS) - reference(IDS[None]).logits[0]).abs().max() < 2e-4
    odd = write_gguf(reference, tmp_path / "odd.gguf", extra={"rope_freqs.weight": factors**0.5 + 1})
    with pytest.raises(UnsupportedModelError, match=r"odd\.gguf: rope_freqs other than those of Llama 3"):
        convert_gguf(odd)


def test_every_end_that_a_vocabulary_has_ends_a_text(tmp_path: Path) -> None:
    """Of Llama 3's three ends a file names one: an answer that calls a tool would go on behind it."""
    tokens = list(gguf_metadata("byte-level")["tokenizer.ggml.tokens"])
    tokens[0], tokens[1], tokens[330] = "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>"
    file = write_gguf(reference_model("llama"), tmp_path / "a.gguf", more={"tokenizer.ggml.tokens": tokens})
    assert Tokenizer.from_directory(convert_gguf(file)).eos_token_ids == (0, 1, 2, 330)


YARN = {
    "rope_type": "yarn",
    "rope_theta": 1000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "beta_fast": 8.0,
    "beta_slow": 2.0,
}


@pytest.mark.parametrize(
    ("rope", "scaling"),
    [
        (
            YARN,
            {
                "type": "yarn",
                "factor": 4.0,
                "original_context_length": 16,
                "finetuned": True,
                "yarn_beta_fast": 8.0,
                "yarn_beta_slow": 2.0,
                "attn_factor": 1.0,
            },
        ),
        ({"rope_type": "linear", "factor": 4.0, "rope_theta": 1000.0}, {"type": "linear", "factor": 4.0}),
    ],
    ids=["yarn", "linear"],
)
def test_stretched_positions_are_as_the_file_says(rope: Any, scaling: dict[str, Any], tmp_path: Path) -> None:
    """context_length is that of the stretched model: with it in place of the original one, angles differ."""
    reference = reference_model("qwen3", max_position_embeddings=64, rope_parameters=rope)
    more = {f"qwen3.rope.scaling.{name}": value for name, value in scaling.items()}
    model = load_model(
        convert_gguf(write_gguf(reference, tmp_path / "model.gguf", more=more)), dtype=torch.float32
    )
    assert (all_logits(model, IDS) - reference(IDS[None]).logits[0]).abs().max() < 2e-4
    assert model.config.max_position_embeddings == {"yarn": 64, "linear": 256}[rope["rope_type"]]


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        (
            "rope.scaling.yarn_attn_factor",
            0.5,
            r"qwen3\.rope\.scaling\.yarn_attn_factor=0\.5 is not supported",
        ),
        ("attention.causal", False, "is_causal false"),
    ],
)
def test_what_would_be_computed_otherwise_is_refused(
    field: str, value: Any, message: str, tmp_path: Path
) -> None:
    more = {"qwen3.rope.scaling.type": "yarn", "qwen3.rope.scaling.factor": 4.0, f"qwen3.{field}": value}
    with pytest.raises(UnsupportedModelError, match=message):
        convert_gguf(write_gguf(reference_model("qwen3"), tmp_path / "model.gguf", more=more))


def test_the_second_load_does_not_open_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write_gguf(reference_model("llama"), tmp_path / "model.gguf")
    directory = convert_gguf(file)
    monkeypatch.setattr(conversion, "_convert", lambda *_: pytest.fail("converted twice"))
    assert convert_gguf(file) == directory


def test_a_changed_file_is_converted_anew(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    first = convert_gguf(write_gguf(reference_model("llama"), file))
    second = convert_gguf(write_gguf(reference_model("llama-tied"), file))
    assert first != second


def test_large_files_become_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conversion, "_SHARD_BYTES", 50_000)
    reference = reference_model("llama")
    directory = convert_gguf(write_gguf(reference, tmp_path / "model.gguf"))
    assert len(list(directory.glob("model-*.safetensors"))) > 2
    logits = all_logits(load_model(directory, dtype=torch.float32), IDS)
    assert (logits - reference(IDS[None]).logits[0]).abs().max() < 2e-4


def test_values_beyond_half_precision_keep_their_range(tmp_path: Path) -> None:
    reference = reference_model("llama", hidden_size=96, intermediate_size=96)
    reference.lm_head.weight[0, 0] = 1e6
    file = write_gguf(reference, tmp_path / "model.gguf", quantisation=gguf.GGMLQuantizationType.Q8_0)
    assert load_model(convert_gguf(file), dtype=torch.float32).lm_head.weight.max() > 9e5


def test_broken_files_leave_nothing_behind(tmp_path: Path, cache: Path) -> None:
    whole = write_gguf(reference_model("llama"), tmp_path / "model.gguf").read_bytes()
    for keep in (0, 3, 100, 9_000, len(whole) - 1_000):
        file = tmp_path / f"broken-{keep}.gguf"
        file.write_bytes(whole[:keep])
        with pytest.raises(WeightsError, match=rf"broken-{keep}\.gguf is not a readable GGUF file"):
            convert_gguf(file)
    assert not list((cache / "gguf").iterdir())


def test_what_a_gguf_lacks_or_has_too_much_is_named(tmp_path: Path) -> None:
    reference = reference_model("llama")
    with pytest.raises(
        UnsupportedModelError, match="architecture gemma2 is not supported; supported are llama"
    ):
        convert_gguf(write_gguf(reference, tmp_path / "a.gguf", kind="gemma2"))
    with pytest.raises(ModelError, match=r"b\.gguf: GGUF metadata field llama\.block_count is missing"):
        convert_gguf(write_gguf(reference, tmp_path / "b.gguf", drop="block_count"))
    extra = {"blk.0.ffn_gate_inp.weight": np.ones((2, 2), np.float32)}
    with pytest.raises(WeightsError, match=r"ffn_gate_inp\.weight has no place in a llama model"):
        convert_gguf(write_gguf(reference, tmp_path / "c.gguf", extra=extra))
    with pytest.raises(TokenizerError, match="'tekken' is not supported"):
        convert_gguf(write_gguf(reference, tmp_path / "d.gguf", pre="tekken"))
    directory = convert_gguf(write_gguf(reference, tmp_path / "e.gguf", drop="blk.1.ffn_up.weight"))
    with pytest.raises(WeightsError, match=r"missing from the checkpoint: layers\.1\.mlp\.up_proj"):
        load_model(directory)
    with pytest.raises(ModelError, match=r"none\.gguf does not exist"):
        convert_gguf(tmp_path / "none.gguf")
