"""Which form a step runs in, what forms cannot do, and where adapters add to products."""

from pathlib import Path
from typing import Any

import pytest
import torch

from ostinato.kernels.linear import products
from ostinato.kernels.lora import NO_ADAPTER
from ostinato.models import layers
from ostinato.models.config import ModelConfig
from ostinato.models.forms import Few, FormError, General, Scaled, Step
from ostinato.models.transformer import Transformer
from ostinato.models.weights import load_model

from .random_adapters import RandomAdapters
from .small_models import FAMILIES, dense_attend, saved_model
from .test_launches import FORMS, MODELS, SHAPE, on_a_hopper

IDS = torch.randint(0, 97, (24,), generator=torch.Generator().manual_seed(5))


def in_two_parts(x: torch.Tensor, weight: Any, bias: torch.Tensor | None) -> torch.Tensor:
    """As kernels that share the columns leave a product."""
    half = x.size(1) // 2
    first = torch.nn.functional.linear(x[:, :half], weight.tensor[:, :half], bias)
    return torch.stack([first, torch.nn.functional.linear(x[:, half:], weight.tensor[:, half:])])


@pytest.mark.parametrize("parts", ["whole", "in parts"])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("num_tokens", [7, len(IDS)])
def test_adapters_change_a_step_as_merged_weights_would(
    family: str, parts: str, num_tokens: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved_model(family, tmp_path)
    torch.manual_seed(1)
    model = load_model(tmp_path, dtype=torch.float32)
    adapters = RandomAdapters(model)
    attend, ids, positions = dense_attend(model), IDS[:num_tokens], torch.arange(num_tokens)
    if parts == "in parts":
        monkeypatch.setattr(products, "linear_in_parts", in_two_parts)
    for slot in range(2):
        merged = load_model(tmp_path, dtype=torch.float32)
        adapters.merge_into(merged, slot)
        rows = adapters.for_tokens(torch.full((num_tokens,), slot, dtype=torch.int32))
        with torch.no_grad():
            wanted, without = (each(ids, positions, attend) for each in (merged, model))
            found = model(ids, positions, attend, rows)
        torch.testing.assert_close(found, wanted, atol=5e-4, rtol=5e-4)
        assert (wanted - without).abs().max() > 0.1, "adapters that change nothing prove nothing"


@pytest.mark.parametrize("num_tokens", [7, len(IDS)])
def test_tokens_without_an_adapter_keep_their_bits(num_tokens: int, tmp_path: Path) -> None:
    saved_model("qwen3", tmp_path)
    model = load_model(tmp_path, dtype=torch.float32)
    adapters = RandomAdapters(model)
    attend, ids, positions = dense_attend(model), IDS[:num_tokens], torch.arange(num_tokens)
    slots = torch.full((num_tokens,), NO_ADAPTER, dtype=torch.int32)
    slots[-2:] = 0  # whom nobody before attends to
    with torch.no_grad():
        found = model(ids, positions, attend, adapters.for_tokens(slots))
        without = model(ids, positions, attend)
    assert torch.equal(found[:-2], without[:-2])
    assert not torch.equal(found[-2:], without[-2:])


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
            assert "adapter" in str(form.why_not(step._replace(has_adapters=True)))
        assert General().why_not(step._replace(has_adapters=True)) is None


def test_a_cpu_runs_the_general_form() -> None:
    model = Transformer(ModelConfig.from_dict({**SHAPE, **MODELS["qwen3"]}))
    assert {model.form(count).name for count in FORMS} == {"general"}


def test_weights_of_a_format_that_no_form_runs_are_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layers, "PLAIN", "fp8")
    model = Transformer(ModelConfig.from_dict({**SHAPE, **MODELS["qwen3"]}))
    with pytest.raises(FormError, match=r"few: .*not fp8; scaled: .*not fp8; general: .*not fp8"):
        model(IDS, IDS, dense_attend(model))
