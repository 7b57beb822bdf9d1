"""Which form a step runs in, what forms cannot do, and where adapters add to products."""

from pathlib import Path
from typing import Any

import pytest
import torch

from ostinato.kernels import lora
from ostinato.kernels.linear import products, scaled_rows
from ostinato.kernels.lora import NO_ADAPTER, Adapted
from ostinato.models import layers
from ostinato.models.config import ModelConfig
from ostinato.models.forms import Few, Form, FormError, General, Scaled, Step
from ostinato.models.transformer import Transformer
from ostinato.models.weights import load_model

from .random_adapters import RandomAdapters, attend_alone
from .small_models import FAMILIES, dense_attend, saved_model
from .test_launches import FORMS, MODELS, SHAPE, on_a_hopper

IDS = torch.randint(0, 97, (24,), generator=torch.Generator().manual_seed(5))


def in_two_parts(
    x: torch.Tensor, weight: Any, bias: torch.Tensor | None, adapted: Adapted | None = None
) -> torch.Tensor:
    """As kernels that share the columns leave a product."""
    half = x.size(1) // 2
    first = torch.nn.functional.linear(x[:, :half], weight.tensor[:, :half], bias)
    if adapted is not None:
        lora.add(x, first, *adapted)
    return torch.stack([first, torch.nn.functional.linear(x[:, half:], weight.tensor[:, half:])])


@pytest.mark.parametrize("parts", ["whole", "in parts"])
@pytest.mark.parametrize("family", FAMILIES)
def test_adapters_change_a_step_as_merged_weights_would(
    family: str, parts: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved_model(family, tmp_path)
    torch.manual_seed(1)
    model = load_model(tmp_path, dtype=torch.float32)
    adapters = RandomAdapters(model)
    attend, positions = dense_attend(model), torch.arange(len(IDS))
    if parts == "in parts":
        monkeypatch.setattr(products, "linear_in_parts", in_two_parts)
    for slot in range(2):
        merged = load_model(tmp_path, dtype=torch.float32)
        adapters.merge_into(merged, slot)
        rows = adapters.for_tokens(torch.full(IDS.shape, slot, dtype=torch.int32))
        with torch.no_grad():
            wanted, without = (each(IDS, positions, attend) for each in (merged, model))
            found = model(IDS, positions, attend, rows)
        torch.testing.assert_close(found, wanted, atol=5e-4, rtol=5e-4)
        assert (wanted - without).abs().max() > 0.1, "adapters that change nothing prove nothing"


@pytest.mark.parametrize("form", [Few, Scaled, General])
@pytest.mark.parametrize("num_tokens", [7, len(IDS)])
def test_every_form_gives_each_token_its_own_adapter_and_leaves_others_alone(
    form: type[Form[Any]], num_tokens: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In plain torch; the kernels of the forms have the same checks on a GPU."""
    monkeypatch.setattr(scaled_rows, "SQUARES_TOGETHER", 16)  # these models are narrow
    monkeypatch.setattr(Transformer, "form", lambda self, num_tokens, adapters: form(adapters))
    saved_model("qwen3", tmp_path)
    torch.manual_seed(1)
    model = load_model(tmp_path, dtype=torch.float32)
    adapters = RandomAdapters(model)
    ids, slots = IDS[:num_tokens], torch.arange(num_tokens, dtype=torch.int32) % 4 - 1
    with torch.no_grad():
        found = model(ids, ids, attend_alone, adapters.for_tokens(slots))
        without = model(ids, ids, attend_alone)
        assert torch.equal(found[slots == NO_ADAPTER], without[slots == NO_ADAPTER])
        for slot in range(3):
            merged = load_model(tmp_path, dtype=torch.float32)
            adapters.merge_into(merged, slot)
            wanted = merged(ids, ids, attend_alone)[slots == slot]
            torch.testing.assert_close(found[slots == slot], wanted, atol=5e-4, rtol=5e-4)
            assert (slot == 2) == torch.equal(found[slots == slot], without[slots == slot])


@pytest.mark.parametrize("num_tokens", FORMS)
def test_the_first_form_that_can_runs_a_step(num_tokens: int) -> None:
    pytest.importorskip("triton")
    with on_a_hopper():
        model = Transformer(ModelConfig.from_dict({**SHAPE, **MODELS["qwen3"]}))
        step = Step(
            num_tokens, model.matrix_shapes, frozenset({"plain"}), torch.bfloat16, torch.device("cuda", 0)
        )
        reasons = {form.name: form.why_not(step) for form in (Few(), Scaled(), General())}
        assert next(name for name, reason in reasons.items() if reason is None) == FORMS[num_tokens]


def test_a_cpu_runs_the_general_form() -> None:
    model = Transformer(ModelConfig.from_dict({**SHAPE, **MODELS["qwen3"]}))
    assert {model.form(count).name for count in FORMS} == {"general"}


def test_weights_of_a_format_that_no_form_runs_are_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layers, "PLAIN", "fp8")
    model = Transformer(ModelConfig.from_dict({**SHAPE, **MODELS["qwen3"]}))
    with pytest.raises(FormError, match=r"few: .*not fp8; scaled: .*not fp8; general: .*not fp8"):
        model(IDS, IDS, dense_attend(model))
