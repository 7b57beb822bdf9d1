"""Which form a step runs in, what forms cannot do, and where adapters add to products."""

from pathlib import Path
from typing import Any

import pytest
import torch

from ostinato.kernels.linear import products
from ostinato.models import layers
from ostinato.models.config import ModelConfig
from ostinato.models.forms import Few, FormError, General, Scaled, Step
from ostinato.models.layers import Linear
from ostinato.models.transformer import Transformer
from ostinato.models.weights import load_model

from .small_models import FAMILIES, dense_attend, saved_model
from .test_launches import FORMS, MODELS, SHAPE, on_a_hopper

IDS = torch.randint(0, 97, (24,), generator=torch.Generator().manual_seed(5))


class LowRank:
    """An adapter for every linear layer of a model's layers."""

    def __init__(self, model: Transformer) -> None:
        generator = torch.Generator().manual_seed(1)
        self.factors: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
        self.asked: list[str] = []
        for name, module in model.layers.named_modules():
            if isinstance(module, Linear):
                rows, columns = module.weight.shape
                self.factors[f"layers.{name}"] = (
                    torch.randn(columns, 2, generator=generator) / columns**0.5,
                    torch.randn(2, rows, generator=generator),
                )

    def __call__(self, name: str, x: torch.Tensor, product: torch.Tensor) -> None:
        self.asked.append(name)
        down, up = self.factors[name]
        product += x @ down @ up

    def merge_into(self, model: Transformer) -> None:
        """The same by other weights."""
        for name, (down, up) in self.factors.items():
            model.get_submodule(name).weight += (down @ up).T  # type: ignore[operator]


def in_two_parts(x: torch.Tensor, weight: Any, bias: torch.Tensor | None) -> torch.Tensor:
    """As kernels that share the columns leave a product."""
    half = x.size(1) // 2
    first = torch.nn.functional.linear(x[:, :half], weight.tensor[:, :half], bias)
    return torch.stack([first, torch.nn.functional.linear(x[:, half:], weight.tensor[:, half:])])


@pytest.mark.parametrize("parts", ["whole", "in parts"])
@pytest.mark.parametrize("family", FAMILIES)
def test_adapters_change_a_step_as_merged_weights_would(
    family: str, parts: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved_model(family, tmp_path)
    model, merged = (load_model(tmp_path, dtype=torch.float32) for _ in range(2))
    adapters = LowRank(model)
    adapters.merge_into(merged)
    attend, positions = dense_attend(model), torch.arange(len(IDS))
    with torch.no_grad():
        wanted, without = (each(IDS, positions, attend) for each in (merged, model))
        if parts == "in parts":
            monkeypatch.setattr(products, "linear_in_parts", in_two_parts)
        found = model(IDS, positions, attend, adapters)
    torch.testing.assert_close(found, wanted, atol=2e-4, rtol=2e-4)
    assert (wanted - without).abs().max() > 0.1, "adapters that change nothing prove nothing"
    assert adapters.asked == list(adapters.factors), "each product once, in the order of a layer"


@pytest.mark.parametrize("num_tokens", FORMS)
def test_a_step_with_adapters_runs_in_a_form_that_can_add_them(num_tokens: int) -> None:
    pytest.importorskip("triton")
    with on_a_hopper():
        model = Transformer(ModelConfig.from_dict({**SHAPE, **MODELS["qwen3"]}))
        step = Step(
            num_tokens, model.matrix_shapes, frozenset({"plain"}), torch.bfloat16, torch.device("cuda", 0)
        )
        reasons = {form.name: form.why_not(step) for form in (Few(), Scaled(), General())}
        assert next(name for name, reason in reasons.items() if reason is None) == FORMS[num_tokens]
        for form in (Few(), Scaled()):
            assert "adapter" in str(form.why_not(step._replace(has_deltas=True)))
        assert General(print).why_not(step._replace(has_deltas=True)) is None


def test_a_cpu_runs_the_general_form() -> None:
    model = Transformer(ModelConfig.from_dict({**SHAPE, **MODELS["qwen3"]}))
    assert {model.form(count).name for count in FORMS} == {"general"}


def test_weights_of_a_format_that_no_form_runs_are_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layers, "PLAIN", "fp8")
    model = Transformer(ModelConfig.from_dict({**SHAPE, **MODELS["qwen3"]}))
    with pytest.raises(FormError, match=r"few: .*not fp8; scaled: .*not fp8; general: .*not fp8"):
        model(IDS, IDS, dense_attend(model))
