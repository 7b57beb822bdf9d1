"""Which table of kernels an engine takes: the one asked for, the environment's, the tuned one, or none."""

import logging
from collections.abc import Hashable
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import torch

from ostinato.engine.loading import kernel_table
from ostinato.engine.loading.kernel_table import TABLE_VARIABLE, tuned_table, use_table_of_user
from ostinato.engine.stepping import model_runner
from ostinato.engine.stepping.model_runner import ModelRunner
from ostinato.graphs import BatchDescriptor, ConfigError, GraphKey, GraphMode
from ostinato.kernels.attention import shared_memory
from ostinato.kernels.linear import choice
from ostinato.kernels.linear.kernel_table import Choice, KernelTable
from ostinato.kernels.linear.table_file import save_table
from ostinato.kernels.linear.tiles import MatrixShape, SkinnyTile
from ostinato.models.config import ModelConfig
from ostinato.models.transformer import Transformer

GPU = torch.device("cuda", 0)
SHAPE = MatrixShape(64, 32)


@pytest.fixture(autouse=True)
def _machine_with_a_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA Made-Up 1")
    monkeypatch.setenv("OSTINATO_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv(TABLE_VARIABLE, raising=False)
    choice.use_table(None)
    yield
    choice.use_table(None)


def table_with(stages: int, file: Path, gpu: str = "NVIDIA Made-Up 1") -> str:
    save_table(KernelTable(gpu, {SHAPE: (Choice(2, 8, SkinnyTile(16, 64, 64, 4, stages)),)}), file)
    return str(file)


def stages_chosen() -> int | None:
    return getattr(choice.choose(SHAPE, 4, torch.bfloat16, GPU), "num_stages", None)


def test_what_is_asked_for_beats_the_environment_which_beats_the_tuned_one(monkeypatch, tmp_path):
    use_table_of_user(None, GPU)
    assert stages_chosen() is None
    assert tuned_table(GPU) == tmp_path / "cache" / "kernel-tables" / "nvidia-made-up-1.json"
    table_with(2, tuned_table(GPU))
    use_table_of_user(None, GPU)
    assert stages_chosen() == 2
    monkeypatch.setenv(TABLE_VARIABLE, table_with(3, tmp_path / "environment.json"))
    use_table_of_user(None, GPU)
    assert stages_chosen() == 3
    use_table_of_user(table_with(4, tmp_path / "asked.json"), GPU)
    assert stages_chosen() == 4
    monkeypatch.delenv(TABLE_VARIABLE)
    tuned_table(GPU).unlink()
    use_table_of_user(None, GPU)
    assert stages_chosen() is None, "an engine without a table does not inherit that of the one before"


def test_a_tuned_table_that_cannot_be_read_is_ignored_with_a_warning(caplog, tmp_path):
    """Nobody asked for it: it may be left from another version."""
    tuned_table(GPU).parent.mkdir(parents=True)
    tuned_table(GPU).write_text('{"gpu": "NVIDIA Made-Up 1", "matrices": [')
    with caplog.at_level(logging.WARNING):
        use_table_of_user(None, GPU)
    assert stages_chosen() is None
    assert "ostinato tune" in caplog.text
    with pytest.raises(ConfigError, match="cannot be read"):
        use_table_of_user(str(tuned_table(GPU)), GPU)


def test_an_engine_on_a_cpu_leaves_the_table_of_one_on_a_gpu_alone(tmp_path):
    use_table_of_user(table_with(4, tmp_path / "asked.json"), GPU)
    use_table_of_user(None, torch.device("cpu"))
    assert stages_chosen() == 4


def test_graphs_share_warm_ups_as_far_as_the_table_says(tiny, monkeypatch):
    """A range that ends between two sizes, of layers or of the head, makes their kernels differ."""
    model = Transformer(ModelConfig.load(Path(tiny.directory)))
    config = SimpleNamespace(device=GPU, dtype=torch.bfloat16, max_model_len=256, page_columns=16)
    monkeypatch.setattr(model_runner, "gpu_of", lambda _: shared_memory.H200)
    runner = cast("ModelRunner", SimpleNamespace(model=model, config=config))
    (layer, _), *_, (head, _) = model.products_of(1, 1)
    one, other = SkinnyTile(16, 64, 64, 4, 2), SkinnyTile(16, 64, 64, 4, 3)
    table = KernelTable("", {layer: (Choice(2, 8, one),), head: (Choice(2, 4, one), Choice(5, 64, other))})

    def kernels(num_tokens: int, num_reqs: int) -> Hashable:
        descriptor = BatchDescriptor(num_tokens, num_reqs)
        return ModelRunner.kernels_of(runner, GraphKey(GraphMode.FULL, descriptor))

    with choice.using(table):
        assert kernels(5, 3) == kernels(8, 4)
        assert len({kernels(8, 4), kernels(8, 5), kernels(9, 4), kernels(9, 5)}) == 4
        assert kernels(9, 5) != kernels(40, 17) == kernels(4096, 32), "attention has larger tiles for more"


def test_a_table_that_cannot_be_used_is_an_error_of_the_configuration(monkeypatch, tmp_path):
    with pytest.raises(ConfigError, match=r"absent\.json cannot be read"):
        use_table_of_user(str(tmp_path / "absent.json"), GPU)
    broken = tmp_path / "broken.json"
    broken.write_text('{"gpu": "x"}')
    monkeypatch.setenv(TABLE_VARIABLE, str(broken))
    with pytest.raises(ConfigError, match=r"broken\.json: it has no list"):
        use_table_of_user(None, GPU)


def test_a_table_of_another_gpu_is_used_with_a_warning(tmp_path, caplog):
    with caplog.at_level(logging.WARNING, kernel_table.logger.name):
        use_table_of_user(table_with(4, tmp_path / "other.json", gpu="NVIDIA Other"), GPU)
    assert stages_chosen() == 4
    assert "was made on NVIDIA Other, not on NVIDIA Made-Up 1" in caplog.text


def test_on_a_cpu_there_is_nothing_to_choose(monkeypatch, tmp_path):
    monkeypatch.setenv(TABLE_VARIABLE, str(tmp_path / "absent.json"))
    use_table_of_user(None, torch.device("cpu"))
    with pytest.raises(ConfigError, match="kernels of a GPU"):
        use_table_of_user(str(tmp_path / "absent.json"), torch.device("cpu"))
