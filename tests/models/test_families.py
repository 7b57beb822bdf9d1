"""A model family is data and a file: one that nobody has heard of runs by saying what it is."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from ostinato.models import families
from ostinato.models.families.family import Family
from ostinato.models.families.tensor_names import LIKE_LLAMA, TensorNames
from ostinato.models.layer_kind import LayerKind
from ostinato.models.weights import checkpoint_tensors, load_model

from .small_models import all_logits, dense_attend, saved_model

IDS = torch.arange(30)
NAMES = TensorNames(
    top={"embed_tokens": "wte", "norm": "ln_f", "lm_head": "head"},
    layers="h",
    in_layer={
        **LIKE_LLAMA.in_layer,
        "self_attn.qkv_proj": ("attn.q", "attn.k", "attn.v"),
        "mlp.gate_up_proj": ("mlp.gate_up",),
    },
)
"""With other names; gate and up are one."""


def made_up(raw: Any, num_layers: int) -> tuple[LayerKind, ...]:
    """Windows in every second layer."""
    return tuple(LayerKind(window=5 if index % 2 else None) for index in range(num_layers))


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkpoint of that family, made of one of Llama."""
    family = Family("MadeUp", made_up, tensors=NAMES)
    for name in family.architectures:
        monkeypatch.setitem(families.BY_ARCHITECTURE, name, family)
    saved_model("llama", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "architectures": ["MadeUpForCausalLM"]}))
    stored = load_file(tmp_path / "model.safetensors")
    renamed = {}
    for name, tensor in stored.items():
        for old, new in (
            ("model.layers", "h"),
            ("model.embed_tokens", "wte"),
            ("model.norm", "ln_f"),
            ("lm_head", "head"),
            *((f"self_attn.{part}_proj", f"attn.{part}") for part in "qkv"),
        ):
            name = name.replace(old, new)
        renamed[name] = tensor
    for layer in range(config["num_hidden_layers"]):
        both = [renamed.pop(f"h.{layer}.mlp.{part}_proj.weight") for part in ("gate", "up")]
        renamed[f"h.{layer}.mlp.gate_up.weight"] = torch.cat(both)
    save_file(renamed, tmp_path / "model.safetensors")
    return tmp_path


def test_a_new_family_loads_by_its_own_names_and_has_its_own_layers(
    directory: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    model = load_model(directory, dtype=torch.float32)
    llama_directory = tmp_path_factory.mktemp("llama")
    saved_model("llama", llama_directory)
    llama = load_model(llama_directory, dtype=torch.float32)
    assert checkpoint_tensors(model).keys() == load_file(directory / "model.safetensors").keys()
    assert model.state_dict().keys() == llama.state_dict().keys(), "our own names are the same for all"
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, llama.state_dict()[name]), name
    assert model.config.layer_windows == (None, 5, None)
    assert not torch.equal(all_logits(model, IDS), all_logits(llama, IDS))
    torch.testing.assert_close(all_logits(model, IDS[:5]), all_logits(llama, IDS[:5]))


def test_one_layer_of_each_of_its_kinds_is_run_for_all(directory: Path) -> None:
    model, seen = load_model(directory, dtype=torch.float32), []
    dense = dense_attend(model)

    def attend(layer: int, *heads: torch.Tensor) -> torch.Tensor:
        seen.append(layer)
        return dense(layer, *heads)

    with model.one_layer_of_each_kind():
        model(IDS, IDS, attend)
    assert seen == [0, 1]


def test_names_follow_the_architecture_and_each_is_there_once() -> None:
    assert len(families.BY_ARCHITECTURE) == 3 * len(families.FAMILIES)
    gguf = [family.gguf for family in families.FAMILIES if family.gguf]
    assert len(set(gguf)) == len(gguf)
