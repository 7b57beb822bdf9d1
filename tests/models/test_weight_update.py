"""New weights in the memory of the old ones: all of them or none, under the names of the checkpoint."""

from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from models.small_models import FAMILIES, reference_model
from ostinato.models import weight_update
from ostinato.models.errors import WeightsError
from ostinato.models.transformer import Transformer
from ostinato.models.weight_update import TornWeightsError, WeightPlaces, update_weights
from ostinato.models.weights import checkpoint_tensors, load_model

SETS = ("llama", "llama-tied", "qwen3-biases-tied")


@pytest.fixture(scope="module", params=SETS)
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp(request.param)
    reference_model(request.param).save_pretrained(folder)
    return folder


@pytest.fixture
def model(directory: Path) -> Transformer:
    return load_model(directory)


def contents(model: Transformer) -> dict[str, torch.Tensor]:
    return {name: view.clone() for name, view in checkpoint_tensors(model).items()}


def other_weights(model: Transformer, seed: int = 3) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(view.shape, generator=generator) for name, view in checkpoint_tensors(model).items()
    }


def assert_equal(model: Transformer, wanted: dict[str, torch.Tensor]) -> None:
    for name, view in checkpoint_tensors(model).items():
        assert torch.equal(view, wanted[name].to(view.dtype)), name


def test_places_that_are_kept_know_when_a_weight_has_moved(model: Transformer) -> None:
    places, new = WeightPlaces(model), other_weights(model)
    update_weights(model, new, places)
    assert places.are_current
    assert_equal(model, new)
    model.norm.weight.data = model.norm.weight.data.clone()
    assert not places.are_current
    places = WeightPlaces(model)
    model.norm.weight = torch.nn.Parameter(model.norm.weight.detach().clone(), requires_grad=False)
    assert not places.are_current
    with pytest.raises(TornWeightsError, match="1 parameters moved"):
        update_weights(model, new, places)


@pytest.mark.parametrize("form", ["mapping", "list", "iterator", "half", "short names"])
def test_whatever_is_given_is_there_afterwards_and_nothing_else(model: Transformer, form: str) -> None:
    old, new = contents(model), other_weights(model)
    addresses = {name: view.data_ptr() for name, view in checkpoint_tensors(model).items()}
    if form == "half":
        new = dict(list(new.items())[::2])
    given = {
        "mapping": new,
        "half": new,
        "list": list(new.items()),
        "iterator": iter(new.items()),
        "short names": {name.removeprefix("model."): tensor.double().float() for name, tensor in new.items()},
    }[form]
    updated = update_weights(model, given)
    assert_equal(model, old | new)
    assert set(updated.names) == set(new)
    assert updated.is_complete == (form != "half")
    assert updated.num_bytes == sum(old[name].nbytes for name in new)
    assert {name: view.data_ptr() for name, view in checkpoint_tensors(model).items()} == addresses


def test_a_directory_of_weights(tmp_path: Path) -> None:
    source, target = reference_model("qwen3"), tmp_path / "a"
    source.save_pretrained(target)
    model = load_model(target)
    for parameter in source.parameters():
        parameter.mul_(-0.5)
    source.save_pretrained(tmp_path / "b")
    assert update_weights(model, tmp_path / "b").is_complete
    assert_equal(model, contents(load_model(tmp_path / "b")))


def test_a_directory_of_another_model_of_the_same_shapes_is_told_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    reference_model("llama").save_pretrained(tmp_path / "a")
    reference_model("llama3-rope", rms_norm_eps=0.01).save_pretrained(tmp_path / "b")
    model = load_model(tmp_path / "a")
    update_weights(model, tmp_path / "a")
    assert not caplog.messages
    update_weights(model, tmp_path / "b")
    [line] = caplog.messages
    assert "differs in rope, rms_norm_eps from that of the model" in line


def test_tied_models_need_no_output_layer_and_take_one(model: Transformer) -> None:
    if not model.config.tie_word_embeddings:
        pytest.skip("has its own")
    new = other_weights(model)
    update_weights(model, {**new, "lm_head.weight": new["model.embed_tokens.weight"]})
    assert_equal(model, new)


@pytest.mark.parametrize("as_iterator", [False, True])
@pytest.mark.parametrize("first", [False, True])
def test_a_tied_model_takes_no_output_layer_of_its_own(
    model: Transformer, as_iterator: bool, first: bool, caplog: pytest.LogCaptureFixture
) -> None:
    if not model.config.tie_word_embeddings:
        pytest.skip("has its own")
    old, new = contents(model), other_weights(model)
    own = {"lm_head.weight": new["model.embed_tokens.weight"] * 2}
    pairs = list((own | new if first else new | own).items())
    with pytest.raises(WeightsError, match=r"lm_head\.weight differs from model\.embed_tokens\.weight, but"):
        update_weights(model, iter(pairs) if as_iterator else pairs)
    assert_equal(model, old)
    with pytest.raises(WeightsError, match=r"lm_head.weight has shape \[3\], not"):
        update_weights(model, {"lm_head.weight": torch.zeros(3)})
    # Weights that come in several updates, the output layer before the embeddings.
    update_weights(model, iter(own.items()) if as_iterator else own)
    assert "lm_head.weight differs from model.embed_tokens.weight" in caplog.text
    assert_equal(model, old)


class _OfManyRanks(torch.Tensor):
    """As torch's DTensor, which wants a group of processes."""

    def full_tensor(self) -> torch.Tensor:
        raise NotImplementedError


def given_away() -> torch.Tensor:
    """As FSDP leaves parameters that it has sharded: a shape and no memory; to read it ends the process."""
    tensor = torch.zeros(48)
    tensor.untyped_storage().resize_(0)
    return tensor


FAULTS = {
    "an unknown name": ("model.layers.0.nothing.weight", torch.zeros(3), "has no place in"),
    "a wrong shape": ("model.norm.weight", torch.zeros(7), r"has shape \[7\], not \[48\]"),
    "integers": ("model.norm.weight", torch.zeros(48, dtype=torch.int32), "torch.int32"),
    "no tensor": ("model.norm.weight", [0.0] * 48, "must be a tensor, not list"),
    "nothing in it": ("model.norm.weight", torch.zeros(48, device="meta"), "meta"),
    "given away": ("model.norm.weight", given_away(), "has no memory"),
    "of many ranks": (
        "model.norm.weight",
        torch.zeros(48).as_subclass(_OfManyRanks),
        r"its full_tensor\(\)",
    ),
    "sparse": ("model.norm.weight", torch.zeros(48).to_sparse(), r"its to_dense\(\)"),
    "no name": (7, torch.zeros(48), "name must be a string, not int"),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("as_iterator", [False, True])
def test_one_that_does_not_fit_changes_nothing(model: Transformer, fault: str, as_iterator: bool) -> None:
    old = contents(model)
    name, tensor, message = FAULTS[fault]
    pairs = [pair for pair in other_weights(model).items() if pair[0] != name]
    pairs.insert(len(pairs) // 2, (name, tensor))
    with pytest.raises(WeightsError, match=message):
        update_weights(model, iter(pairs) if as_iterator else pairs)
    assert_equal(model, old)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("form", ["mapping", "iterator", "directory"])
def test_one_that_is_not_finite_changes_nothing(
    model: Transformer, value: float, form: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    old, new = contents(model), other_weights(model)
    name = list(new)[len(new) // 2]
    new[name].view(-1)[-1] = value
    if form == "directory":
        save_file(new, tmp_path / "model.safetensors")

    def given() -> object:
        return {"mapping": new, "iterator": iter(new.items()), "directory": tmp_path}[form]

    with pytest.raises(
        WeightsError, match=rf"{name} \(1 {value!r:.3}.*allow_nonfinite".replace("nan", "NaN")
    ):
        update_weights(model, given())
    assert_equal(model, old)
    update_weights(model, given(), allow_nonfinite=True)
    assert name in caplog.text
    kept = checkpoint_tensors(model)[name].view(-1)
    assert not kept[-1].isfinite()
    assert kept[:-1].isfinite().all()


@pytest.mark.parametrize("as_iterator", [False, True])
def test_one_that_is_too_large_for_the_models_type_changes_nothing(as_iterator: bool, tmp_path: Path) -> None:
    reference_model("llama").save_pretrained(tmp_path)
    model = load_model(tmp_path, dtype=torch.float16)
    old, new = contents(model), other_weights(model)
    new["model.norm.weight"][7] = 65519.0  # rounds to the largest number of float16
    update_weights(model, iter(new.items()) if as_iterator else new)
    update_weights(model, old)
    new["model.norm.weight"][7] = 65520.0
    with pytest.raises(WeightsError, match=r"model\.norm\.weight \(1 values above 65504"):
        update_weights(model, iter(new.items()) if as_iterator else new)
    assert_equal(model, old)


@pytest.mark.parametrize("given", [5, [1, 2], [("a", "b", "c")], "nowhere/at/all"])
def test_what_is_no_set_of_weights_is_refused(model: Transformer, given: object) -> None:
    old = contents(model)
    with pytest.raises(WeightsError):
        update_weights(model, given)
    assert_equal(model, old)


def test_twice_the_same_weight_is_refused(model: Transformer) -> None:
    old, pair = contents(model), ("model.norm.weight", torch.ones(48))
    for twice in ([pair, ("norm.weight", torch.ones(48))], iter([pair, pair])):
        with pytest.raises(WeightsError, match="given twice"):
            update_weights(model, twice)
    assert_equal(model, old)


@settings(max_examples=15, deadline=None)
@given(at=st.integers(0, 20), error=st.sampled_from([OSError, KeyboardInterrupt, MemoryError, GeneratorExit]))
def test_an_iterator_that_fails_leaves_the_old_weights(at: int, error: type[BaseException]) -> None:
    with torch.random.fork_rng():
        model = load_model_of("llama")
    old, new = contents(model), other_weights(model)

    def failing():  # type: ignore[no-untyped-def]
        for index, pair in enumerate(new.items()):
            if index == at:
                raise error("half way")
            yield pair

    with pytest.raises(error):
        update_weights(model, failing())
    assert_equal(model, old)


_models: dict[str, Transformer] = {}


def load_model_of(family: str) -> Transformer:
    from ostinato.models.config import ModelConfig
    from ostinato.models.weights import fill_with_random_weights

    if family not in _models:
        config = reference_model(family).config
        config.architectures = [f"{FAMILIES[family][0]}ForCausalLM"]
        _models[family] = Transformer(ModelConfig.from_dict(config.to_dict()))
        fill_with_random_weights(_models[family])
    return _models[family]


def test_a_checkpoint_that_lacks_one_leaves_the_old_weights(directory: Path, tmp_path: Path) -> None:
    model = load_model(directory)
    old = contents(model)
    tensors = {name: tensor * 2 for name, tensor in load_file(directory / "model.safetensors").items()}
    del tensors["model.norm.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(WeightsError, match="missing"):
        update_weights(model, tmp_path)
    assert_equal(model, old)


def test_weights_may_come_from_the_model_itself(model: Transformer) -> None:
    """Two layers exchanged: neither may be overwritten before it was read."""
    views = checkpoint_tensors(model)
    names = [name for name in views if name.startswith("model.layers.0.")]
    swapped = {name.replace("layers.0.", "layers.1."): views[name] for name in names}
    swapped |= {name: views[name.replace("layers.0.", "layers.1.")] for name in names}
    wanted = contents(model) | {name: tensor.clone() for name, tensor in swapped.items()}
    update_weights(model, swapped)
    assert_equal(model, wanted)


@pytest.mark.parametrize("by_numpy", [False, True])
@pytest.mark.parametrize("as_iterator", [False, True])
def test_a_weight_may_be_the_one_that_is_there_the_other_way_round(
    model: Transformer, as_iterator: bool, by_numpy: bool
) -> None:
    """It begins where it is written to, and numpy's views of it have storages of their own."""
    name = "model.layers.0.self_attn.o_proj.weight"
    own = checkpoint_tensors(model)[name]
    if own.size(0) != own.size(1):
        pytest.skip("not square")
    turned = torch.from_numpy(own.numpy().T) if by_numpy else own.t()
    wanted = contents(model) | {name: turned.clone()}
    update_weights(model, iter([(name, turned)]) if as_iterator else {name: turned})
    assert_equal(model, wanted)


def test_an_interrupt_waits_for_a_mapping_to_be_written(model: Transformer) -> None:
    new, interrupts = other_weights(model), iter([KeyboardInterrupt()])
    pop = list.pop

    class Left(list):  # type: ignore[type-arg]
        def pop(self, *at):  # type: ignore[no-untyped-def]
            if len(self) == 5 and (stop := next(interrupts, None)) is not None:
                raise stop
            return pop(self, *at)

    with patch.object(weight_update, "list", Left, create=True), pytest.raises(KeyboardInterrupt):
        update_weights(model, new)
    assert_equal(model, new)


def test_a_device_that_fails_in_between_says_that_weights_are_torn(model: Transformer) -> None:
    class Broken(torch.Tensor):
        @classmethod
        def __torch_function__(cls, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            if function is torch.Tensor.copy_:
                raise RuntimeError("device lost")
            return super().__torch_function__(function, types, args, kwargs or {})

    new = other_weights(model)
    new["model.norm.weight"] = new["model.norm.weight"].as_subclass(Broken)
    with pytest.raises(TornWeightsError, match="device lost"):
        update_weights(model, new)
