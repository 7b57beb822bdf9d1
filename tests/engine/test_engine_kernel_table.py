"""Which table of kernels an engine takes: the one asked for, the environment's, the tuned one, or none."""

import logging
from collections.abc import Hashable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from ostinato.engine.config import EngineConfig
from ostinato.engine.loading import kernel_table
from ostinato.engine.loading.kernel_table import TABLE_VARIABLE, tuned_table, use_table_of_user
from ostinato.engine.stepping import planned_graphs
from ostinato.engine.stepping.planned_graphs import PlannedGraphs
from ostinato.graphs import BatchDescriptor, ConfigError, GraphKey, GraphMode, Ladder
from ostinato.kernels import variants
from ostinato.kernels.attention.backend import AttentionBackend
from ostinato.kernels.cuda import compiled
from ostinato.kernels.gpu import H200, Gpu
from ostinato.kernels.linear import choice
from ostinato.kernels.linear.tables import Choice, KernelTable, save_table
from ostinato.kernels.linear.tiles import Library, MatrixShape, SkinnyTile, StreamedTile
from ostinato.models.config import ModelConfig
from ostinato.models.transformer import Transformer

GPU = torch.device("cuda", 0)
MADE_UP = Gpu((8, 9), 142)
SHAPE = MatrixShape(64, 32)


@pytest.fixture(autouse=True)
def _machine_with_a_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA Made-Up 1")
    for module in (kernel_table, choice, variants):
        monkeypatch.setattr(module, "gpu_of", lambda _: MADE_UP)
    monkeypatch.setattr(compiled, "is_supported", lambda _: False)
    monkeypatch.setattr(compiled, "why_unsupported", lambda _: "kernels in CUDA C++ do not run here")
    monkeypatch.setenv("OSTINATO_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv(TABLE_VARIABLE, raising=False)
    choice.use_table(None)
    yield
    choice.use_table(None)


def table_with(stages: int, file: Path, gpu: str = str(MADE_UP)) -> str:
    save_table(KernelTable(gpu, {SHAPE: (Choice(2, 8, SkinnyTile(16, 64, 64, 4, stages)),)}), file)
    return str(file)


def stages_chosen() -> int | None:
    return getattr(choice.choose(SHAPE, 4, torch.bfloat16, GPU), "num_stages", None)


def test_what_is_asked_for_beats_the_environment_which_beats_the_tuned_one(monkeypatch, tmp_path):
    use_table_of_user(None, GPU)
    assert stages_chosen() is None
    assert tuned_table(GPU) == tmp_path / "cache" / "kernel-tables" / "sm89-142.json"
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
    tuned_table(GPU).write_text('{"gpu": "sm89-142", "matrices": [')
    with caplog.at_level(logging.WARNING):
        use_table_of_user(None, GPU)
    assert stages_chosen() is None
    assert "ostinato tune" in caplog.text
    with pytest.raises(ConfigError, match="cannot be read"):
        use_table_of_user(str(tuned_table(GPU)), GPU)


def test_a_tuned_table_that_is_called_by_its_gpus_name_is_told_of(caplog, tmp_path):
    """It would be passed over without a word."""
    old = tmp_path / "cache" / "kernel-tables" / "nvidia-made-up-1.json"
    table_with(2, old)
    with caplog.at_level(logging.WARNING):
        use_table_of_user(None, GPU)
    assert stages_chosen() is None
    assert str(old) in caplog.text
    assert "`ostinato tune`" in caplog.text


@pytest.mark.parametrize("by", ["option", "environment"])
def test_all_tables_can_be_switched_off(monkeypatch, tmp_path, by):
    table_with(2, tuned_table(GPU))
    package = KernelTable(str(MADE_UP), {SHAPE: (Choice(2, 8, SkinnyTile(16, 64, 64, 4, 5)),)})
    monkeypatch.setattr(choice, "package_table", lambda _: package)
    choice.use_table(None)
    assert stages_chosen() == 5
    if by == "environment":
        monkeypatch.setenv(TABLE_VARIABLE, "none")
    use_table_of_user("none" if by == "option" else None, GPU)
    assert stages_chosen() is None, "neither the tuned table nor that of the package"
    monkeypatch.delenv(TABLE_VARIABLE, raising=False)
    use_table_of_user(None, GPU)
    assert stages_chosen() == 2, "the next engine has tables again"


def test_what_does_not_run_on_a_gpu_is_told_with_the_reason(caplog, tmp_path):
    """Slower than it could be, and nobody would know why."""
    choices = Choice(2, 8, StreamedTile(32, 2, 1, 128, 3, 8, 64)), Choice(9, 16, Library())
    save_table(KernelTable(str(MADE_UP), {MatrixShape(64, 512): choices}), tmp_path / "asked.json")
    with caplog.at_level(logging.WARNING):
        use_table_of_user(str(tmp_path / "asked.json"), GPU)
    assert "kernels in CUDA C++ do not run here" in caplog.text
    for operation in ("linear", "attention.decode", "attention.prompt", "lora"):
        [told] = [line for line in caplog.messages if line.startswith(f"{operation} (plain)")]
        assert "sm90-132, not on sm89-142" in told
        assert ("`ostinato tune`" in told) is (operation == "linear")
    assert "1 of 2 choices of the table do not run on sm89-142" in caplog.text


def test_on_hopper_there_is_nothing_to_tell(caplog, monkeypatch):
    for module in (kernel_table, choice):
        monkeypatch.setattr(module, "gpu_of", lambda _: Gpu((9, 0), 132))
    monkeypatch.setattr(compiled, "why_unsupported", lambda _: None)
    with caplog.at_level(logging.WARNING):
        use_table_of_user(None, GPU)
    assert caplog.text == ""


def test_an_engine_on_a_cpu_leaves_the_table_of_one_on_a_gpu_alone(tmp_path):
    use_table_of_user(table_with(4, tmp_path / "asked.json"), GPU)
    use_table_of_user(None, torch.device("cpu"))
    assert stages_chosen() == 4


def test_graphs_share_warm_ups_as_far_as_the_table_says(tiny, monkeypatch):
    """A range that ends between two sizes, of layers or of the head, makes their kernels differ."""
    model = Transformer(ModelConfig.load(Path(tiny.directory)))
    asked = EngineConfig(model=tiny.directory)
    config: Any = SimpleNamespace(
        config=asked,
        device=GPU,
        dtype=torch.bfloat16,
        lora_cases=(0,),
        max_model_len=256,
        max_positions=256,
        page_columns=16,
        context_buckets=(None,),
        decode_ladder=Ladder([1]),
        token_ladder=Ladder([8, 9]),
        max_running_requests=8,
    )
    monkeypatch.setattr(planned_graphs, "gpu_of", lambda _: H200)
    attention = cast("AttentionBackend", SimpleNamespace(most_places=lambda *_: 8))
    planned = PlannedGraphs(model, attention, config, GraphMode.FULL, None)
    (layer, _), *_, (head, _) = model.products_of(1, 1)
    one, other = SkinnyTile(16, 64, 64, 4, 2), SkinnyTile(16, 64, 64, 4, 3)
    table = KernelTable("", {layer: (Choice(2, 8, one),), head: (Choice(2, 4, one), Choice(5, 64, other))})

    def kernels(num_tokens: int, num_reqs: int) -> Hashable:
        descriptor = BatchDescriptor(num_tokens, num_reqs)
        return planned.kernels_of(GraphKey(GraphMode.FULL, descriptor))

    with choice.using(table):
        assert kernels(5, 3) == kernels(8, 4)
        assert len({kernels(8, 4), kernels(8, 5), kernels(9, 4), kernels(9, 5)}) == 4
        assert kernels(9, 5) != kernels(40, 17) == kernels(4096, 32), "attention has larger tiles for more"
        assert kernels(8, 1) != kernels(5, 1), "the former is for one request, with a kernel of its own"


def test_a_table_that_cannot_be_used_is_an_error_of_the_configuration(monkeypatch, tmp_path):
    with pytest.raises(ConfigError, match=r"absent\.json cannot be read"):
        use_table_of_user(str(tmp_path / "absent.json"), GPU)
    broken = tmp_path / "broken.json"
    broken.write_text('{"gpu": "sm89-142"}')
    monkeypatch.setenv(TABLE_VARIABLE, str(broken))
    with pytest.raises(ConfigError, match=r"broken\.json: it has no list"):
        use_table_of_user(None, GPU)


def test_a_table_of_another_gpu_is_used_with_a_warning(tmp_path, caplog):
    with caplog.at_level(logging.WARNING, kernel_table.logger.name):
        use_table_of_user(table_with(4, tmp_path / "other.json", gpu="sm90-132"), GPU)
    assert stages_chosen() == 4
    assert "was made on sm90-132, not on sm89-142" in caplog.text


def test_on_a_cpu_there_is_nothing_to_choose(monkeypatch, tmp_path):
    monkeypatch.setenv(TABLE_VARIABLE, str(tmp_path / "absent.json"))
    use_table_of_user(None, torch.device("cpu"))
    with pytest.raises(ConfigError, match="kernel_table needs a GPU"):
        use_table_of_user(str(tmp_path / "absent.json"), torch.device("cpu"))
