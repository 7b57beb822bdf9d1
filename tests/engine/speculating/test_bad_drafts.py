"""A draft that does not fit its target is refused by name, before anything is allocated for either."""

from pathlib import Path
from typing import Any

import pytest

from models.small_drafts import head_config, head_weights, save_head
from models.small_models import saved_model
from ostinato.engine.llm import LLM
from ostinato.engine.loading import load as loading
from ostinato.engine.loading.load import ModelLoadError
from ostinato.graphs.errors import ConfigError


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> str:
    directory = tmp_path_factory.mktemp("target")
    saved_model("llama", directory)
    return str(directory)


@pytest.fixture
def nothing_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **options: object) -> None:
        raise AssertionError("weights were asked for")

    monkeypatch.setattr(loading, "fill_model", refuse)


def refused_head(folder: Path, changes: dict[str, Any], missing: str | None) -> dict[str, Any]:
    weights = {name: each for name, each in head_weights("eagle3").items() if name != missing}
    save_head(folder, head_config("eagle3", **changes), weights)
    return {"method": "eagle3", "model": str(folder), "num_speculative_tokens": 3}


@pytest.mark.usefixtures("nothing_is_loaded")
@pytest.mark.parametrize(
    ("changes", "missing", "named"),
    [
        ({"vocab_size": 96}, None, "vocab_size 96 differs from the target's 97"),
        ({"hidden_size": 60}, None, "hidden_size 60 differs from the target's 48"),
        ({}, "fc.weight", r"tensors missing from the draft's checkpoint: fc\.weight"),
    ],
)
def test_a_head_for_another_model(
    target: str, changes: dict[str, Any], missing: str | None, named: str, tmp_path: Path
) -> None:
    with pytest.raises(ModelLoadError, match=named):
        LLM(target, speculative_config=refused_head(tmp_path, changes, missing))


@pytest.mark.usefixtures("nothing_is_loaded")
def test_a_folder_that_is_not_there_and_a_model_of_another_vocabulary(target: str, tmp_path: Path) -> None:
    asked = {"method": "draft_model", "num_speculative_tokens": 3, "model": str(tmp_path / "nothing")}
    with pytest.raises(ModelLoadError, match="nothing"):
        LLM(target, speculative_config=asked)
    saved_model("qwen3", tmp_path / "other", vocab_size=98)
    with pytest.raises(ModelLoadError, match="vocab_size 98 differs from the target's 97"):
        LLM(target, speculative_config={**asked, "model": str(tmp_path / "other")})


@pytest.mark.parametrize("count", [0, -1, 16, 1.5])
def test_numbers_of_drafts_that_cannot_be(target: str, count: float) -> None:
    with pytest.raises(ConfigError, match=r"num_speculative_tokens must be an integer, from 1 to 15"):
        LLM(target, speculative_config={"method": "ngram", "num_speculative_tokens": count})
