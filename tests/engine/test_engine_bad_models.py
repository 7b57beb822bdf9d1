"""A model that cannot be loaded says why; an engine that serves already is not disturbed by the attempt."""

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from models.small_models import saved_model
from ostinato.engine.llm import LLM
from ostinato.engine.loading.load import ModelLoadError
from ostinato.models.config import SUPPORTED_ARCHITECTURES

from .conftest import TINY, TinyModel, prompts_of, write_byte_tokenizer
from .test_engine_greedy import GREEDY, SMALL, TOKENS, assert_all_back


@pytest.fixture(scope="module")
def serving(tiny: TinyModel) -> Iterator[LLM]:
    with LLM(tiny.directory, **SMALL) as llm:
        yield llm


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("sharded")
    saved_model("llama", directory, max_shard_size="40KB")
    return directory


def truncate(directory: Path, keep: int) -> None:
    file = directory / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])


def edit_config(directory: Path, **fields: Any) -> None:
    file = directory / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **fields}))


def drop_tensor(directory: Path) -> None:
    tensors = load_file(directory / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, directory / "model.safetensors")


WAYS: dict[str, tuple[Callable[[Path], object], str]] = {
    "empty-file": (lambda at: truncate(at, 0), r"model\.safetensors is not a readable safetensors file"),
    "cut-header": (lambda at: truncate(at, 100), r"model\.safetensors is not a readable safetensors file"),
    "cut-weights": (lambda at: truncate(at, 30_000), r"not a readable safetensors file.*download it again"),
    "garbage": (
        lambda at: (at / "model.safetensors").write_bytes(b"\x07" * 5000),
        r"model\.safetensors is not a readable safetensors file",
    ),
    "missing-tensor": (drop_tensor, r"missing from the checkpoint: layers\.1\.mlp\.up_proj\.weight"),
    "other-shape": (lambda at: edit_config(at, hidden_size=64), r"has shape .* config\.json requires"),
    "no-weights": (lambda at: (at / "model.safetensors").unlink(), r"neither model\.safetensors nor"),
    "no-config": (lambda at: (at / "config.json").unlink(), r"config\.json"),
    "broken-config": (lambda at: (at / "config.json").write_text("{"), r"config\.json is not valid JSON"),
    "experts": (lambda at: edit_config(at, num_local_experts=8), "mixture of experts .* dense only"),
    "quantised": (
        lambda at: edit_config(at, quantization_config={"quant_method": "awq"}),
        "quantised weights .*'awq'.* are not supported",
    ),
    "rope": (
        lambda at: edit_config(at, rope_parameters={"rope_type": "longrope"}),
        "rope_type 'longrope' is not supported; supported are default, linear, llama3, yarn",
    ),
    "broken-tokenizer": (
        lambda at: (at / "tokenizer.json").write_text("{"),
        r"tokenizer\.json is not a readable tokenizer",
    ),
}


def assert_still_serving(serving: LLM, model: TinyModel) -> None:
    [prompt] = prompts_of((21,))
    before = serving.graph_report().replays
    [output] = serving.generate([prompt], GREEDY)
    assert output.outputs[0].token_ids == model.greedy(tuple(prompt["prompt_token_ids"]), TOKENS)
    assert serving.graph_report().replays > before
    assert serving.graph_report().eager_steps == {}
    assert_all_back(serving)


@pytest.mark.parametrize("way", WAYS)
def test_each_way_a_model_can_be_broken(serving: LLM, tiny: TinyModel, tmp_path: Path, way: str) -> None:
    directory = tmp_path / "model"
    shutil.copytree(tiny.directory, directory)
    spoil, message = WAYS[way]
    spoil(directory)
    output = serving.engine.add(prompts_of((5,))[0], GREEDY)
    serving.engine.step()
    with pytest.raises(ModelLoadError, match=message):
        LLM(str(directory), **SMALL)
    while not output.finished:
        serving.engine.step()
    assert_still_serving(serving, tiny)


def test_a_missing_shard_is_named(serving: LLM, tiny: TinyModel, sharded: Path, tmp_path: Path) -> None:
    directory = tmp_path / "model"
    shutil.copytree(sharded, directory)
    shards = sorted(directory.glob("model-*.safetensors"))
    with LLM(str(directory), **SMALL) as whole:
        [output] = whole.generate(prompts_of((5,), vocabulary=97), replace(GREEDY, ignore_eos=True))
        assert len(output.outputs[0].token_ids) == TOKENS
    shards[1].unlink()
    with pytest.raises(ModelLoadError, match=rf"1 of {len(shards)} shards missing: {shards[1].name}"):
        LLM(str(directory), **SMALL)
    assert_still_serving(serving, tiny)


def test_an_unsupported_architecture_is_named_and_the_supported_ones_listed(
    serving: LLM, tiny: TinyModel, tmp_path: Path
) -> None:
    config = {**TINY, "architectures": ["GPT2LMHeadModel"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelLoadError) as raised:
        LLM(str(tmp_path), **SMALL)
    assert "architecture GPT2LMHeadModel is not supported" in str(raised.value)
    for name in SUPPORTED_ARCHITECTURES:
        assert name in str(raised.value)
    assert_still_serving(serving, tiny)


@pytest.mark.parametrize("name", ["", "no/such/directory", "nonsense", "./missing.gguf"])
def test_a_model_that_is_nowhere(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ModelLoadError, match=r"\w+"):
        LLM(name, **SMALL)


@pytest.mark.parametrize("with_tokenizer", [True, False])
def test_a_broken_generation_config(tiny: TinyModel, tmp_path: Path, with_tokenizer: bool) -> None:
    directory = tmp_path / "model"
    shutil.copytree(tiny.directory, directory)
    if with_tokenizer:
        write_byte_tokenizer(directory)
    (directory / "generation_config.json").write_text("{")
    with pytest.raises(ModelLoadError, match=r"generation_config\.json"):
        LLM(str(directory), **SMALL).close()


def test_dummy_weights_need_a_config_only(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**TINY, "architectures": ["LlamaForCausalLM"]}))
    with LLM(str(tmp_path), load_format="dummy", **SMALL) as llm:
        [output] = llm.generate(prompts_of((5,)), GREEDY)
        assert len(output.outputs[0].token_ids) == TOKENS
        memory = llm.memory_report()
        for name in ("weights", "kv", "inputs", "outputs", "sampling", "activations"):
            assert memory[name] > 0, name
        assert memory.keys() >= {"workspace", "graphs"}  # what the libraries and the driver take on a GPU
