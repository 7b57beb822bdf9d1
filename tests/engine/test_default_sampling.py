"""What requests that say nothing are sampled with: generation_config.json, as the peers use it."""

import asyncio
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from ostinato import AsyncLLM, ConfigError, EngineConfig
from ostinato.engine.llm import LLM
from ostinato.engine.loading.defaults import default_sampling
from ostinato.engine.loading.load import ModelLoadError
from ostinato.engine.parameters.sampling_params import RequestError, SamplingParams
from ostinato.models.default_model import DEFAULT_MODEL_SAMPLING

from .conftest import TinyModel

QWEN = {
    "bos_token_id": 1,
    "do_sample": True,
    "repetition_penalty": 1.05,
    "temperature": 0.7,
    "top_p": 0.8,
    "top_k": 20,
    "transformers_version": "4.37.0",
}
SMALL: dict[str, Any] = {
    "max_model_len": 64,
    "num_pages": 20,
    "max_running_requests": 2,
    "disable_cuda_graph": True,
}


def folder_with(folder: Path, content: object) -> Path:
    (folder / "generation_config.json").write_text(json.dumps(content))
    return folder


def found(folder: Path, **options: Any) -> dict[str, float]:
    return default_sampling(EngineConfig(model=str(folder), **options), folder)


def test_the_models_own_values_are_the_defaults(tmp_path: Path) -> None:
    assert found(tmp_path) == {}
    folder_with(tmp_path, {**QWEN, "min_p": 0.01, "max_new_tokens": 77, "top_p": None})
    expected = {"repetition_penalty": 1.05, "temperature": 0.7, "top_k": 20, "min_p": 0.01, "max_tokens": 77}
    assert found(tmp_path) == expected


def test_they_can_be_switched_off_overridden_and_taken_from_elsewhere(tmp_path: Path) -> None:
    own, other = tmp_path / "own", tmp_path / "other"
    own.mkdir()
    other.mkdir()
    folder_with(own, QWEN)
    folder_with(other, {"temperature": 0.1})
    assert found(own, generation_config="none") == {}
    assert found(own, generation_config=str(other)) == {"temperature": 0.1}
    override = {"temperature": 0.3, "max_new_tokens": 9}
    assert found(own, override_generation_config=override) == {
        "repetition_penalty": 1.05,
        "top_p": 0.8,
        "top_k": 20,
        "temperature": 0.3,
        "max_tokens": 9,
    }
    assert found(own, generation_config="none", override_generation_config={"top_k": 5}) == {"top_k": 5}


def test_the_default_model_has_those_of_its_card(tmp_path: Path) -> None:
    assert default_sampling(EngineConfig(), tmp_path) == DEFAULT_MODEL_SAMPLING
    assert default_sampling(EngineConfig(generation_config="none"), tmp_path) == {}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"generation_config": "nowhere"}, "there is no nowhere/generation_config.json; use auto, none"),
        ({"override_generation_config": {"beams": 2}}, "'beams' is not supported; supported: temperature"),
        ({"override_generation_config": {"top_p": 2}}, "override_generation_config: top_p must be above 0"),
    ],
)
def test_wrong_options_are_refused_by_name(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        found(tmp_path, **options)


def test_a_wrong_value_in_the_file_names_the_file(tiny_text: TinyModel, tmp_path: Path) -> None:
    folder = shutil.copytree(tiny_text.directory, tmp_path / "model")
    folder_with(folder, {"temperature": "0.7"})
    with pytest.raises(ModelLoadError, match=r"generation_config\.json: temperature must be"):
        LLM(str(folder), **SMALL)


def test_calls_without_parameters_use_them_and_calls_with_do_not(
    tiny_text: TinyModel, tmp_path: Path
) -> None:
    folder = shutil.copytree(tiny_text.directory, tmp_path / "model")
    folder_with(folder, {"temperature": 0.0, "max_new_tokens": 7})
    greedy, talk = SamplingParams(temperature=0, max_tokens=7), [{"role": "user", "content": "Hello"}]
    with LLM(str(folder), **SMALL) as llm:
        assert llm.get_default_sampling_params() == greedy
        expected = llm.generate("Hello", greedy)[0].outputs[0].token_ids
        assert len(expected) == 7
        assert llm.generate("Hello")[0].outputs[0].token_ids == expected
        assert llm.generate(["Hello", "Hi"])[0].outputs[0].token_ids == expected
        assert "".join(llm.stream("Hello")) == llm.generate("Hello", greedy)[0].outputs[0].text
        chatted = llm.chat(talk)[0].outputs[0].token_ids
        assert chatted == llm.chat(talk, greedy)[0].outputs[0].token_ids
        # An explicit SamplingParams is complete as it is: 16 tokens at temperature 1.
        explicit = llm.generate("Hello", SamplingParams())[0].outputs[0].token_ids
        assert len(explicit) == 16
        assert explicit[:7] != expected

    async def last() -> list[int]:
        async with AsyncLLM(str(folder), **SMALL) as llm:
            async for output in llm.generate("Hello"):
                ids = output.outputs[0].token_ids
        return list(ids)

    assert asyncio.run(last()) == expected


def test_an_empty_list_of_parameters_is_not_the_models_own(tiny: TinyModel) -> None:
    with (
        LLM(tiny.directory, max_model_len=64, max_running_requests=2, num_pages=20) as llm,
        pytest.raises(RequestError, match="0 sampling parameters were given for 1 prompts"),
    ):
        llm.generate([{"prompt_token_ids": [1, 2]}], [])
