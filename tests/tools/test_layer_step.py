"""The parts of a layer that are timed one by one are the steps that the form of a step runs."""

from pathlib import Path
from typing import Any

import pytest
import torch

from models.small_models import saved_model
from ostinato.kernels.linear import scaled_rows
from ostinato.models.forms import Few, General, Scaled
from ostinato.models.weights import load_model
from ostinato.tools.layer_step import LayerStep

PRODUCTS = {"qkv", "o", "gate, up", "down"}


@pytest.mark.parametrize(
    ("form", "names"),
    [(Few(), PRODUCTS), (Scaled(), PRODUCTS), (General(), PRODUCTS | {"add, norm"})],
    ids=lambda value: getattr(value, "name", ""),
)
def test_each_form_has_its_steps(
    form: Any, names: set[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved_model("qwen3", tmp_path)
    model = load_model(tmp_path, dtype=torch.float32)
    monkeypatch.setattr(model, "form", lambda num_tokens: form)
    monkeypatch.setattr(scaled_rows, "SQUARES_TOGETHER", 16)  # this model is narrow
    attention = model.layers[0].self_attn
    step: Any = object.__new__(LayerStep)  # the rest of it needs a GPU
    step.model, step.layers = model, list(model.layers)
    step.hidden, step.residual = torch.randn(2, 5, 48).unbind()
    step.attended, step.inner = torch.randn(5, attention.q_width), torch.randn(5, 80)
    steps = step._steps()
    assert set(steps) == names
    for layer in range(3):
        assert steps["qkv"](layer).shape == (5, attention.q_width + 2 * attention.kv_width)
        assert steps["gate, up"](layer).shape == (5, 80)
        for name in names - {"qkv", "gate, up"}:
            result = steps[name](layer)
            assert (result if isinstance(result, torch.Tensor) else result[0]).shape == (5, 48)
