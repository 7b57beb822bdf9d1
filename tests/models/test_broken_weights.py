"""Each way a checkpoint can be wrong, with an error that names the file and the tensor."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from ostinato.models.config import ModelConfig
from ostinato.models.errors import WeightsError
from ostinato.models.weights import load_model, load_weights

from .small_models import saved_model

WEIGHT = "model.layers.1.mlp.up_proj.weight"


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    saved_model("llama", tmp_path)
    return tmp_path


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    saved_model("llama", tmp_path, max_shard_size="40KB")
    return tmp_path


def edit(checkpoint: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(checkpoint / "model.safetensors")
    change(tensors)
    save_file(tensors, checkpoint / "model.safetensors")


def refuse(checkpoint: Path, message: str) -> None:
    with pytest.raises(WeightsError, match=message):
        load_model(checkpoint)


def test_missing_tensor(checkpoint: Path) -> None:
    edit(checkpoint, lambda tensors: tensors.pop(WEIGHT))
    refuse(checkpoint, r"missing from the checkpoint: layers\.1\.mlp\.up_proj\.weight$")


def test_unexpected_tensor(checkpoint: Path) -> None:
    edit(checkpoint, lambda tensors: tensors.update({"model.layers.9.mlp.up_proj.weight": torch.ones(1)}))
    refuse(
        checkpoint, r"model\.safetensors: tensor model\.layers\.9\.mlp\.up_proj\.weight has no place in Llama"
    )


def test_wrong_shape(checkpoint: Path) -> None:
    edit(checkpoint, lambda tensors: tensors.update({WEIGHT: tensors[WEIGHT][:-1].clone()}))
    refuse(checkpoint, rf"{WEIGHT} has shape \[79, 48\], but config\.json requires \[80, 48\]")


def test_unreadable_dtype(checkpoint: Path) -> None:
    edit(checkpoint, lambda tensors: tensors.update({WEIGHT: tensors[WEIGHT].to(torch.float8_e4m3fn)}))
    refuse(checkpoint, rf"{WEIGHT} is stored as F8_E4M3")


@pytest.mark.parametrize("keep", [0, 5, 200, 30_000], ids=lambda keep: f"{keep}-bytes")
def test_broken_file(checkpoint: Path, keep: int) -> None:
    file = checkpoint / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    refuse(checkpoint, r"model\.safetensors is not a readable safetensors file")


def test_missing_shard(shards: Path) -> None:
    lost = sorted(shards.glob("model-*.safetensors"))[1]
    lost.unlink()
    refuse(shards, rf"1 of \d+ shards missing: {lost.name}")


def test_index_and_shard_disagree(shards: Path) -> None:
    shard = sorted(shards.glob("model-*.safetensors"))[0]
    tensors = load_file(shard)
    name = sorted(tensors)[0]
    save_file({key: value for key, value in tensors.items() if key != name} or {"x": torch.ones(1)}, shard)
    refuse(shards, rf"{shard.name}: tensor {name} is missing, although")


@pytest.mark.parametrize("content", ["{", "{}", json.dumps({"weight_map": ["a"]})])
def test_broken_index(shards: Path, content: str) -> None:
    (shards / "model.safetensors.index.json").write_text(content)
    refuse(shards, r"index\.json is not a readable index")


def test_shards_without_an_index(shards: Path) -> None:
    (shards / "model.safetensors.index.json").unlink()
    refuse(shards, "safetensors files, but no model")


def test_no_weights_and_old_weights(checkpoint: Path) -> None:
    (checkpoint / "model.safetensors").unlink()
    refuse(checkpoint, r"neither model\.safetensors nor")
    (checkpoint / "pytorch_model.bin").write_bytes(b"")
    refuse(checkpoint, r"pytorch_model\.bin is in an old format")


def test_an_output_layer_of_its_own_in_a_tied_model(tmp_path: Path) -> None:
    # transformers computes with it, whatever config.json says; vLLM leaves it out.
    saved_model("llama-tied", tmp_path)
    embeddings = "model.embed_tokens.weight"
    edit(tmp_path, lambda tensors: tensors.update({"lm_head.weight": tensors[embeddings] + 0}))
    load_model(tmp_path)
    edit(tmp_path, lambda tensors: tensors["lm_head.weight"][3, 4].add_(1))
    told = 'lm_head.weight in the checkpoint differs from them; to use it, set hf_overrides={"tie_'
    refuse(tmp_path, told)
    config = ModelConfig.load(tmp_path, {"tie_word_embeddings": False})
    assert load_model(tmp_path, config=config).lm_head is not None


def test_files_of_two_savings(tmp_path: Path) -> None:
    saved_model("llama", tmp_path, max_shard_size="40KB")
    saved_model("llama", tmp_path)  # removes the shards, and leaves their index
    assert (tmp_path / "model.safetensors.index.json").is_file()
    load_model(tmp_path)
    saved_model("llama", tmp_path, max_shard_size="40KB")  # leaves the single file
    assert (tmp_path / "model.safetensors").is_file()
    refuse(tmp_path, "that lists other files; remove the older of the two")
    (tmp_path / "model.safetensors").unlink()
    load_model(tmp_path)


def test_no_directory_at_all(checkpoint: Path) -> None:
    with pytest.raises(WeightsError, match="nowhere is not a directory on this machine"):
        load_weights(load_model(checkpoint), checkpoint / "nowhere")


def test_unknown_load_format(checkpoint: Path) -> None:
    with pytest.raises(WeightsError, match="unknown load_format 'pickle': use safetensors or dummy"):
        load_model(checkpoint, load_format="pickle")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("value", "told"), [(float("nan"), "1 NaN"), (float("inf"), "1 inf"), (float("-inf"), "1 -inf")], ids=str
)
@pytest.mark.parametrize("where", [WEIGHT, "model.norm.weight", "model.embed_tokens.weight"])
def test_values_that_are_not_finite(
    checkpoint: Path, where: str, value: float, told: str, caplog: pytest.LogCaptureFixture
) -> None:
    edit(checkpoint, lambda tensors: tensors[where].view(-1)[-3:-2].fill_(value))
    refuse(checkpoint, rf"not finite in float32: {where} \({told} of [\d,]+\); .*allow_nonfinite_weights")
    model = load_model(checkpoint, allow_nonfinite=True)
    assert f"{where} ({told}" in caplog.text
    assert not all(bool(weight.isfinite().all()) for weight in model.parameters())


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sign", [1, -1])
def test_values_too_large_for_the_models_type(checkpoint: Path, stored: torch.dtype, sign: int) -> None:
    def plant(value: float) -> None:
        def change(tensors: dict[str, torch.Tensor]) -> None:
            tensors.update({name: tensor.to(stored) for name, tensor in tensors.items()})
            tensors[WEIGHT][3, 4] = sign * value

        edit(checkpoint, change)

    plant(65504.0 if stored == torch.float32 else 65280.0)
    load_model(checkpoint, dtype=torch.float16)
    plant(70_000.0)
    load_model(checkpoint)
    side = "above 65504" if sign > 0 else "below -65504"
    with pytest.raises(WeightsError, match=rf"{WEIGHT} \(1 values {side}, .* such as bfloat16"):
        load_model(checkpoint, dtype=torch.float16)


def test_every_shard_is_looked_at(shards: Path) -> None:
    files = sorted(shards.glob("model-*.safetensors"))
    for file in (files[0], files[-1]):
        tensors = load_file(file)
        tensors[sorted(tensors)[0]].view(-1)[0] = float("nan")
        save_file(tensors, file)
    first, last = (sorted(load_file(file))[0] for file in (files[0], files[-1]))
    with pytest.raises(WeightsError) as raised:
        load_model(shards)
    assert f"{first} (1 NaN" in str(raised.value)
    assert f"{last} (1 NaN" in str(raised.value)
