"""Heads compute what the papers say, from the files that are published; those that do not fit are named."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ostinato.kernels.linear import scaled_rows
from ostinato.models.drafts.draft import Draft
from ostinato.models.drafts.head import Head
from ostinato.models.drafts.loading import find_draft
from ostinato.models.errors import ModelError
from ostinato.models.forms.few import Few
from ostinato.models.forms.general import General
from ostinato.models.forms.scaled import Scaled
from ostinato.models.taps import Taps
from ostinato.models.transformer import Transformer
from ostinato.models.weights import load_model

from .small_drafts import AUX_LAYERS, PaperHead, head_config, head_weights, save_head
from .small_models import SHAPE, dense_attend, reference_model, saved_model

IDS = torch.randint(0, 97, (30,), generator=torch.Generator().manual_seed(4))
POSITIONS = torch.arange(29)
FORMS = {"general": General, "few": Few, "scaled": Scaled}
METHODS = ["eagle", "eagle3"]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Transformer:
    directory = tmp_path_factory.mktemp("target")
    saved_model("llama", directory)
    return load_model(directory, dtype=torch.float32)


@pytest.fixture(autouse=True)
def no_gradients() -> Any:
    with torch.no_grad():
        yield


def loaded(method: str, folder: Path, target: Transformer) -> Draft:
    return find_draft(method, folder, target.config).load(target, max_positions=64)


def features_of(target: Transformer, method: str) -> Tensor:
    taps = Taps(AUX_LAYERS)
    hidden = target(IDS, torch.arange(30), dense_attend(target), taps=taps)
    return hidden if method == "eagle" else taps.features()


def paper_head(method: str, weights: dict[str, Tensor], target: Transformer) -> PaperHead:
    assert target.lm_head is not None
    return PaperHead(method, weights, target.embed_tokens.weight, target.lm_head.weight)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("fc_bias", [False, True])
@pytest.mark.parametrize("method", METHODS)
def test_a_head_computes_what_its_paper_says(
    method: str,
    fc_bias: bool,
    form: str,
    target: Transformer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    weights = head_weights(method, fc_bias=fc_bias)
    head = loaded(method, save_head(tmp_path, head_config(method), weights), target)
    assert isinstance(head, Head)
    monkeypatch.setattr(scaled_rows, "SQUARES_TOGETHER", 16)
    monkeypatch.setattr(head, "_form", lambda num_tokens: FORMS[form]())
    paper = paper_head(method, weights, target)
    features = features_of(target, method)[:-1]
    expected, carried = paper(IDS[1:], paper.combined(features))
    attend = dense_attend(target)
    states = head(IDS[1:], head.combined(features), POSITIONS, attend)
    assert expected.std() > 0.5
    torch.testing.assert_close(head.logits(states.hidden), expected, atol=1e-4, rtol=1e-4)
    assert states.carried is not None
    torch.testing.assert_close(states.carried, carried, atol=1e-4, rtol=1e-4)
    ids = expected.argmax(-1)
    offsets = head.target_offsets
    assert torch.equal(ids if offsets is None else ids + offsets[ids], paper.to_target(ids))


@pytest.mark.parametrize("form", FORMS)
def test_taps_take_what_transformers_calls_hidden_states(
    form: str, target: Transformer, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = reference_model("llama")(IDS[None], output_hidden_states=True).hidden_states
    monkeypatch.setattr(scaled_rows, "SQUARES_TOGETHER", 16)
    monkeypatch.setattr(target, "form", lambda num_tokens, adapters: FORMS[form]())
    taps = Taps([2, 0])
    target(IDS, torch.arange(30), dense_attend(target), taps=taps)
    both = torch.cat([expected[2][0], expected[0][0]], dim=-1)
    torch.testing.assert_close(taps.features(), both, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("method", METHODS)
def test_other_files_of_the_same_head_load_the_same(method: str, target: Transformer, tmp_path: Path) -> None:
    weights = head_weights(method)
    plain = loaded(method, save_head(tmp_path / "a", head_config(method), weights), target)
    renamed = {
        f"model.{name}".replace("midlayer.", "layers.0.") if name != "lm_head.weight" else name: tensor
        for name, tensor in weights.items()
    }
    copies = {**renamed, "model.embed_tokens.weight": target.embed_tokens.weight.detach()}
    folder = save_head(tmp_path / "b", head_config(method), copies, pickled=True)
    other = loaded(method, folder, target)
    ours, theirs = (dict(each.named_parameters()) for each in (plain, other))
    assert ours.keys() == theirs.keys(), "a copy of the target's table was kept"
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    changed = {**copies, "model.embed_tokens.weight": target.embed_tokens.weight + 1}
    own = loaded(method, save_head(tmp_path / "c", head_config(method), changed), target)
    assert "embed_tokens.weight" in dict(own.named_parameters())


@pytest.mark.parametrize("method", [*METHODS, "draft_model"])
def test_a_draft_can_be_made_up(method: str, target: Transformer, tmp_path: Path) -> None:
    config = (
        {**SHAPE, "architectures": ["LlamaForCausalLM"]} if method == "draft_model" else head_config(method)
    )
    found = find_draft(method, save_head(tmp_path, config, None), target.config, made_up=True)
    first, second = (found.load(target, max_positions=64, seed=3) for _ in range(2))
    assert all(
        torch.equal(a, b) and a.isfinite().all()
        for a, b in zip(first.parameters(), second.parameters(), strict=True)
    )


def test_the_usual_layers_are_tapped_where_a_head_names_none(tmp_path: Path, target: Transformer) -> None:
    from dataclasses import replace

    config = head_config("eagle3")
    del config["eagle_config"]
    folder = save_head(tmp_path, config, None)
    deep = replace(target.config, layers=target.config.layers[:1] * 32)
    head = find_draft("eagle3", folder, deep, made_up=True).head
    assert head is not None
    assert head.tapped_layers == (2, 16, 29)


def without(weights: dict[str, Tensor], *names: str) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in weights.items() if name not in names}


EAGLE3 = head_weights("eagle3")


@pytest.mark.parametrize(
    ("method", "changes", "weights", "named"),
    [
        ("eagle", {"hidden_size": 60}, None, "hidden_size 60 differs from the target's 48"),
        ("eagle", {"vocab_size": 96}, None, "vocab_size 96 differs from the target's 97"),
        ("eagle", {"num_hidden_layers": 2}, None, "num_hidden_layers 2"),
        ("eagle", {"draft_vocab_size": 40}, None, "draft_vocab_size 40"),
        ("eagle3", {"draft_vocab_size": 98}, None, "draft_vocab_size 98"),
        ("eagle3", {"target_hidden_size": 96}, None, "target_hidden_size 96"),
        ("eagle3", {"fc_norm": True}, None, "fc_norm"),
        ("eagle3", {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 3]}}, None, "0 to 2"),
        ("eagle3", {"eagle_config": {}}, None, "eagle_aux_hidden_state_layer_ids is missing"),
        ("eagle3", {"architectures": ["MixtralForCausalLM"]}, None, "MixtralForCausalLM"),
        ("eagle3", {}, without(EAGLE3, "fc.weight", "norm.weight"), "missing.* fc.weight, norm.weight"),
        ("eagle3", {}, without(EAGLE3, "d2t"), "missing.* d2t"),
        ("eagle3", {}, without(EAGLE3, "lm_head.weight"), "missing.* lm_head.weight"),
        ("eagle3", {}, {**EAGLE3, "d2t": EAGLE3["d2t"] + 90}, "d2t maps to tokens"),
        ("eagle3", {}, {**EAGLE3, "fc.weight": torch.zeros(48, 96)}, r"fc.weight has shape \[48, 96\]"),
        ("eagle3", {}, {**EAGLE3, "extra.weight": torch.zeros(1)}, "extra.weight has no place"),
        ("eagle", {}, EAGLE3, "missing.* layers.0.mlp.down_proj.weight"),
    ],
)
def test_a_head_that_does_not_fit_is_refused_before_it_is_loaded(
    method: str,
    changes: dict[str, Any],
    weights: dict[str, Tensor] | None,
    named: str,
    target: Transformer,
    tmp_path: Path,
) -> None:
    folder = save_head(tmp_path, head_config(method, **changes), weights)
    with pytest.raises(ModelError, match=named):
        find_draft(method, folder, target.config, made_up=weights is None)


def test_a_model_of_another_vocabulary_cannot_draft(target: Transformer, tmp_path: Path) -> None:
    saved_model("qwen3", tmp_path, vocab_size=98)
    with pytest.raises(ModelError, match="vocab_size 98 differs from the target's 97"):
        find_draft("draft_model", tmp_path, target.config)
    saved_model("llama", tmp_path / "whole")
    (tmp_path / "whole" / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"neither model\.safetensors nor"):
        find_draft("draft_model", tmp_path / "whole", target.config)
