"""Our logits are those of Hugging Face transformers, family by family, from the files it writes."""

from pathlib import Path
from typing import Any

import pytest
import torch

from ostinato.kernels.attention.batch import HeadPreparation
from ostinato.kernels.linear import scaled_rows
from ostinato.models.forms.few import Few
from ostinato.models.forms.scaled import Scaled
from ostinato.models.mixing import StepAttention
from ostinato.models.weights import checkpoint_tensors, load_model

from .small_models import FAMILIES, all_logits, dense_attend, saved_model

IDS = torch.randint(0, 97, (40,), generator=torch.Generator().manual_seed(3))


def assert_same_logits(model: Any, reference: Any) -> None:
    expected = reference(IDS[None]).logits[0]
    logits = all_logits(model, IDS)
    assert logits.dtype == torch.float32
    assert (logits - expected).abs().max() < 2e-4
    assert torch.equal(logits.argmax(-1), expected.argmax(-1))
    assert expected.std() > 0.5, "a reference with flat logits proves nothing"


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_those_of_transformers(family: str, tmp_path: Path) -> None:
    reference = saved_model(family, tmp_path)
    assert_same_logits(load_model(tmp_path, dtype=torch.float32), reference)


@pytest.mark.parametrize("form", ["few", "scaled"])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_form_of_a_step_gives_these_logits(
    family: str, form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A CPU takes neither by itself."""
    reference = saved_model(family, tmp_path)
    model = load_model(tmp_path, dtype=torch.float32)
    assert model.form(8).name == "general"
    monkeypatch.setattr(model, "form", lambda num_tokens, adapters: {"few": Few(), "scaled": Scaled()}[form])
    monkeypatch.setattr(scaled_rows, "SQUARES_TOGETHER", 16)  # these models are narrow
    assert_same_logits(model, reference)


@pytest.mark.parametrize("family", ["llama", "llama-tied", "qwen3"])
def test_sharded_checkpoints_load_the_same(family: str, tmp_path: Path) -> None:
    reference = saved_model(family, tmp_path, max_shard_size="40KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
    assert_same_logits(load_model(tmp_path, dtype=torch.float32), reference)


def test_a_window_that_covers_less_than_the_context_matters(tmp_path: Path) -> None:
    saved_model("mistral-window", tmp_path)
    model = load_model(tmp_path)
    assert model.config.layer_windows == (5, 5, 5)
    near = all_logits(model, IDS)
    changed = IDS.clone()
    changed[0] = (changed[0] + 1) % 97
    far = all_logits(model, changed)
    reach = 3 * (5 - 1)
    assert not torch.equal(near[reach], far[reach])
    torch.testing.assert_close(near[reach + 1 :], far[reach + 1 :], rtol=0, atol=0)


def test_a_bare_model_loads_and_refuses_to_generate(tmp_path: Path) -> None:
    reference = saved_model("qwen3", tmp_path / "whole")
    reference.model.save_pretrained(tmp_path / "bare")
    model = load_model(tmp_path / "bare")
    whole = load_model(tmp_path / "whole")
    assert not model.config.has_lm_head
    for name, tensor in checkpoint_tensors(model).items():
        assert torch.equal(tensor, checkpoint_tensors(whole)[name]), name
    with pytest.raises(ValueError, match="has no output layer"):
        all_logits(model, IDS)


def test_weights_arrive_in_the_asked_dtype_and_reload_in_place(tmp_path: Path) -> None:
    from ostinato.models.weights import load_weights

    reference = saved_model("qwen2", tmp_path)
    model = load_model(tmp_path, dtype=torch.bfloat16)
    addresses = {name: parameter.data_ptr() for name, parameter in model.named_parameters()}
    assert all(p.dtype == torch.bfloat16 and not p.requires_grad for p in model.parameters())
    assert model.rotary.table.dtype == torch.float32
    for parameter in model.parameters():
        parameter.zero_()
    load_weights(model, tmp_path)
    assert addresses == {name: parameter.data_ptr() for name, parameter in model.named_parameters()}
    expected = reference.state_dict()
    assert checkpoint_tensors(model).keys() == expected.keys()
    for name, tensor in checkpoint_tensors(model).items():
        assert torch.equal(tensor, expected[name].to(torch.bfloat16)), name


@pytest.mark.parametrize("family", ["llama-tied", "qwen3", "llama-biases"])
def test_dummy_weights_are_deterministic_and_sane(family: str, tmp_path: Path) -> None:
    saved_model(family, tmp_path, num_hidden_layers=12)
    (tmp_path / "model.safetensors").unlink()
    first, again, other = (
        all_logits(load_model(tmp_path, load_format="dummy", seed=seed), IDS) for seed in (0, 0, 1)
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert first.isfinite().all()
    assert 0.3 < first.std() < 3
    assert first.argmax(-1).unique().numel() > 5


def test_the_rotary_table_can_be_bounded(tmp_path: Path) -> None:
    reference = saved_model("llama", tmp_path)
    model = load_model(tmp_path, max_positions=40)
    assert model.rotary.table.shape[0] == 40
    assert_same_logits(model, reference)


@pytest.mark.parametrize(
    ("family", "num_layers", "layers"),
    [("llama", 5, [0, 1]), ("llama", 1, [0]), ("qwen2-window", 5, [0, 1, 3])],
)
def test_one_layer_of_each_kind_runs_where_that_is_asked_for(
    family: str, num_layers: int, layers: list[int], tmp_path: Path
) -> None:
    windows = {"max_window_layers": 3} if family == "qwen2-window" else {}
    saved_model(family, tmp_path, num_hidden_layers=num_layers, **windows)
    model = load_model(tmp_path, dtype=torch.float32)
    dense = dense_attend(model)

    def layers_of_a_step() -> list[int]:
        seen: list[int] = []

        def attend(layer: int, *heads: torch.Tensor) -> torch.Tensor:
            seen.append(layer)
            return dense(layer, *heads)

        model(IDS, torch.arange(len(IDS)), attend)
        return seen

    with model.one_layer_of_each_kind():
        assert layers_of_a_step() == layers
    assert layers_of_a_step() == list(range(num_layers))


def test_torch_compile_traces_a_whole_step(tmp_path: Path) -> None:
    """Also where attention starts from rows, as on a GPU."""
    saved_model("qwen3", tmp_path)
    model = load_model(tmp_path, dtype=torch.float32)

    def refuse(*_: Any) -> torch.Tensor:
        raise AssertionError("the model starts from rows")

    def attend_rows(layer: int, rows: torch.Tensor, heads: HeadPreparation) -> torch.Tensor:
        attention = model.layers[layer].self_attn
        queries = rows[:, : attention.q_width] * heads.eps
        return queries.unflatten(-1, (attention.num_heads, attention.head_dim))

    def step(ids: torch.Tensor) -> torch.Tensor:
        return model.logits(model(ids, ids, StepAttention(refuse, attend_rows)))

    compiled = torch.compile(step, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(IDS), step(IDS))
