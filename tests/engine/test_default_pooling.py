"""A model that sentence-transformers saved gives the vectors that it gives there, unless somebody says."""

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from ostinato.engine.llm import LLM
from ostinato.engine.loading.defaults import default_pooling
from ostinato.text.errors import TokenizerError

from .conftest import TinyModel, prompts_of

MODULES = [
    {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
    {"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
    {"idx": 2, "name": "2", "path": "2_Normalize", "type": "sentence_transformers.models.Normalize"},
]
DENSE = {"idx": 2, "name": "2", "path": "2_Dense", "type": "sentence_transformers.models.Dense"}


def saved(directory: Path, pooling: dict[str, Any], modules: Any = MODULES) -> Path:
    (directory / "1_Pooling").mkdir()
    (directory / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    (directory / "modules.json").write_text(json.dumps(modules))
    return directory


@pytest.mark.parametrize(
    ("pooling", "found"),
    [
        ({"pooling_mode_mean_tokens": True, "pooling_mode_lasttoken": False}, "mean"),
        ({"pooling_mode_mean_tokens": False, "pooling_mode_lasttoken": True}, "last"),
        ({"pooling_mode": "mean"}, "mean"),
        ({"pooling_mode": "lasttoken"}, "last"),
    ],
)
def test_pooling_is_read(
    pooling: dict[str, Any], found: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert default_pooling(saved(tmp_path, {"word_embedding_dimension": 32, **pooling})) == found
    assert not caplog.records


@pytest.mark.parametrize(
    ("pooling", "modules", "said"),
    [
        ({"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}, MODULES, "asks for cls_token:"),
        ({"pooling_mode_max_tokens": True, "pooling_mode_mean_tokens": True}, MODULES, "max and mean:"),
        ({}, MODULES, "asks for no pooling"),
        ({"pooling_mode_lasttoken": True}, [*MODULES, DENSE], "Dense in modules.json is not computed"),
    ],
)
def test_what_is_not_computed_is_said(
    pooling: dict[str, Any], modules: Any, said: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert default_pooling(saved(tmp_path, pooling, modules)) == "last"
    assert [said in record.getMessage() for record in caplog.records] == [True]
    assert caplog.records[0].levelno == logging.WARNING


def test_a_broken_list_of_modules_is_named(tmp_path: Path) -> None:
    (tmp_path / "modules.json").write_text("{")
    with pytest.raises(TokenizerError, match=r"modules\.json is not valid JSON"):
        default_pooling(tmp_path)


def test_vectors_are_those_of_the_directory(shallow: TinyModel, tmp_path: Path) -> None:
    shutil.copytree(shallow.directory, tmp_path, dirs_exist_ok=True)
    saved(tmp_path, {"pooling_mode_mean_tokens": True})
    [prompt] = prompts_of((7,))
    with torch.no_grad():
        states = shallow.reference.model(torch.tensor([prompt["prompt_token_ids"]])).last_hidden_state[0]
    expected = {"mean": states.mean(0), "last": states[-1]}
    with LLM(str(tmp_path), cuda_graph_mode="none", max_running_requests=1) as llm:
        for asked, found in ((None, "mean"), ("mean", "mean"), ("last", "last")):
            vector = torch.tensor(llm.embed(prompt, pooling=asked)[0].embedding)
            assert torch.cosine_similarity(vector, expected[found], dim=0) > 0.9999
