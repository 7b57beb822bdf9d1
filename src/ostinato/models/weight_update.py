"""Writes new weights into the memory of the old ones, all of them or none.

Addresses stay, so captured graphs compute with the new weights. Names are those of the checkpoint; weights
that kernels need fused are fused by being written, because every name is a view of its place in memory.

Note [All or none]
A mapping or a list is checked completely before the first byte is written. Its tensors are available and take
one copy each, so no old weights are kept, and an interrupt waits until all are written; if the device fails
in between, the update reports torn weights, and its caller must not use them. An iterator reveals its weights
only one by one, and a directory's file may become unreadable in the middle: there each old weight is copied
to the host before it is overwritten, and restored if the update does not finish. NaN and infinite weights do
not fit, unless they are allowed.
"""

from __future__ import annotations

import logging
import math
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from .config import ModelConfig
from .errors import ModelError, WeightsError
from .finite_weights import FiniteCheck, refuse_nonfinite
from .transformer import Transformer
from .weights import OUTPUT_LAYER, are_equal, checkpoint_tensors, ignorable, is_tied, stored_weights

logger = logging.getLogger("ostinato.models")

NamedTensors = Mapping[str, Tensor] | Iterable[tuple[str, Tensor]]
"""Weights by their names in the checkpoint; not necessarily all."""

_COMPUTED_WITH = ("architecture", "rope", "rms_norm_eps", "layers", "tie_word_embeddings")
"""Fields of a `config.json` that do not show in any weight's shape."""
_READABLE = (torch.float32, torch.float16, torch.bfloat16)


class TornWeightsError(WeightsError):
    """Some weights are new, some old: nothing may be computed until all of them are written again."""


@dataclass(frozen=True)
class UpdatedWeights:
    """What an update has written."""

    names: tuple[str, ...]
    num_bytes: int
    is_complete: bool
    """Whether every weight of the model was written."""


def update_weights(
    model: Transformer,
    new: NamedTensors | str | Path,
    places: WeightPlaces | None = None,
    *,
    allow_nonfinite: bool = False,
) -> UpdatedWeights:
    """Write new weights in place: a directory's, which must be complete, or the given ones. Raises
    WeightsError if one of them does not fit; nothing has changed then. `places`: those of this model, if
    known. `allow_nonfinite`: take NaN and infinite weights, with a warning."""
    places = places or WeightPlaces(model)
    if isinstance(new, str | Path):
        _tell_of_another_config(Path(new), model.config)
        with closing(stored_weights(Path(new), model.embed_tokens.weight.device)) as stored:
            written = _replace(places, stored, allow_nonfinite, must_have=places.names)
    elif isinstance(new, Mapping | list | tuple):
        written = _replace_at_once(places, new, allow_nonfinite)
    else:
        written = _replace(places, _pairs(new), allow_nonfinite)
    places.wait()
    places.check_addresses()
    num_bytes = sum(places.views[name].nbytes for name in written)
    return UpdatedWeights(tuple(written), num_bytes, written.keys() == places.names)


def _tell_of_another_config(directory: Path, config: ModelConfig) -> None:
    """Warn if the `config.json` beside the weights differs, in rotary frequencies, say: only weights are
    used."""
    try:
        given = ModelConfig.load(directory)
    except ModelError:  # missing or not supported: the weights themselves will be checked
        return
    others = [name for name in _COMPUTED_WITH if getattr(given, name) != getattr(config, name)]
    if others:
        logger.warning(
            "the config.json of %s differs in %s from that of the model: only weights are updated, the "
            "model's config stays as it is",
            directory,
            ", ".join(others),
        )


def check_weights(model: Transformer, new: NamedTensors) -> None:
    """Raises WeightsError if one of them does not fit. Writes nothing."""
    _checked(WeightPlaces(model), new)


class WeightPlaces:
    """Where every weight of a model lies. Finding out takes as long as many small updates."""

    def __init__(self, model: Transformer) -> None:
        self._model = model
        self.views = checkpoint_tensors(model)
        self.names = self.views.keys()
        [layer] = model.config.family.tensors.of("embed_tokens")
        self.embeddings = f"{layer}.weight"
        """The name of the embeddings."""
        self.dtype = model.embed_tokens.weight.dtype
        self._short = {name.removeprefix("model."): name for name in self.views}
        self._found = [
            (module._parameters, name, parameter.data_ptr())
            for module in model.modules()
            for name, parameter in module.named_parameters(recurse=False)
        ]
        storages = [view.untyped_storage() for view in self.views.values()]
        self._memory = sorted({(one.data_ptr(), one.data_ptr() + one.nbytes()) for one in storages})
        """Beginnings and ends of the model's memory."""

    def name_of(self, given: object) -> str | None:
        """The model's name of this weight; None if the model does not need it."""
        if not isinstance(given, str):
            raise WeightsError(f"a weight's name must be a string, not {type(given).__name__}")
        short = given.removeprefix("model.")
        if short in self._short:
            return self._short[short]
        if ignorable(short, self._model.config):
            return None
        raise WeightsError(f"weight {given} has no place in {self._model.config.architecture}")

    def is_tied(self, given: object) -> bool:
        """Whether this is the name of an output layer that is the same tensor as the embeddings."""
        return isinstance(given, str) and is_tied(given.removeprefix("model."), self._model.config)

    def check_tied(self, output: object, embeddings: Tensor | None) -> None:
        """An output layer that is not written must equal the embeddings: those given with it, or (None) the
        present ones, which may be about to change."""
        name, held = self.embeddings, self.views[self.embeddings]
        given = self.checked(name, output, as_named=OUTPUT_LAYER)
        if are_equal(given, held if embeddings is None else embeddings.to(held.device, held.dtype)):
            return
        what = f"weight {OUTPUT_LAYER} differs from {name}, but in the model they are the same tensor"
        if embeddings is not None:
            raise WeightsError(f"{what} (tie_word_embeddings)")
        logger.warning("%s: it is not updated; only %s can be", what, name)

    def checked(self, name: str, given: object, as_named: str = "") -> Tensor:
        """The tensor, if it can be written to its place. `as_named`: its name in errors, if different."""
        view = self.views[name]
        name = as_named or name
        if not isinstance(given, Tensor):
            raise WeightsError(f"weight {name} must be a tensor, not {type(given).__name__}")
        if given.shape != view.shape:
            raise WeightsError(f"weight {name} has shape {list(given.shape)}, not {list(view.shape)}")
        if given.dtype not in _READABLE:
            raise WeightsError(f"weight {name} is {given.dtype}; supported are float32, float16 and bfloat16")
        if given.device.type == "meta":
            raise WeightsError(f"weight {name} is on the meta device: it has no contents")
        if hasattr(given, "full_tensor"):  # torch's DTensor, which takes a second to import
            raise WeightsError(
                f"weight {name} is a {type(given).__name__}, distributed over ranks: pass its full_tensor()"
            )
        if given.layout is not torch.strided:
            raise WeightsError(f"weight {name} is {given.layout}: pass a dense tensor, its to_dense()")
        if given.numel() and not given.untyped_storage().nbytes():
            raise WeightsError(
                f"weight {name} has no memory, probably because it is sharded or offloaded: gather it first"
            )
        # A tensor in the model's own memory might be overwritten before it is read.
        is_same = given.data_ptr() == view.data_ptr() and given.stride() == view.stride()
        return given.clone() if self._is_own(given) and not is_same else given

    def _is_own(self, given: Tensor) -> bool:
        """Whether it lies in the model's memory, even if torch or numpy use another storage object for it."""
        address = given.data_ptr()
        begin, end = self._memory[max(0, bisect_right(self._memory, (address, math.inf)) - 1)]
        return begin <= address < end

    def wait(self) -> None:
        """Wait until all is written: then the memory of the given tensors may be reused."""
        device = self._model.embed_tokens.weight.device
        if device.type == "cuda":
            try:
                torch.cuda.current_stream(device).synchronize()
            except RuntimeError as error:
                raise TornWeightsError(f"an update of weights was interrupted: {error}") from error

    @property
    def are_current(self) -> bool:
        """Whether every parameter is still at the address where it was found."""
        return not self._num_moved

    @property
    def _num_moved(self) -> int:
        now = ((owner.get(name), address) for owner, name, address in self._found)
        return sum(parameter is None or parameter.data_ptr() != address for parameter, address in now)

    def check_addresses(self) -> None:
        if count := self._num_moved:
            raise TornWeightsError(f"{count} parameters moved during an update of weights")


def _pairs(new: object) -> Iterator[tuple[object, object]]:
    if not isinstance(new, Iterable):
        raise WeightsError(f"weights must be a directory, a mapping or pairs, not {type(new).__name__}")
    for pair in new:
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            raise WeightsError(f"weights must be pairs of a name and a tensor, not {type(pair).__name__}")
        yield pair[0], pair[1]


def _checked(places: WeightPlaces, new: NamedTensors) -> dict[str, Tensor]:
    pairs = new.items() if isinstance(new, Mapping) else new
    checked: dict[str, Tensor] = {}
    for given, tensor in _pairs(pairs):
        name = places.name_of(given)
        if name is not None:
            _refuse_twice(name, checked)
            checked[name] = places.checked(name, tensor)
    return checked


def _replace_at_once(places: WeightPlaces, new: NamedTensors, allow_nonfinite: bool) -> dict[str, Tensor]:
    """Everything is available: check all first, then write all."""
    checked = _checked(places, new)
    for given, tensor in new.items() if isinstance(new, Mapping) else new:
        if places.is_tied(given):
            places.check_tied(tensor, checked.get(places.embeddings))
    finite = FiniteCheck(places.dtype)
    for name, tensor in checked.items():
        finite.add(name, tensor)
    found = ((name, checked[name]) for name in finite.bad())
    refuse_nonfinite(found, places.dtype, place="", allowed=allow_nonfinite)
    try:
        interrupt = _write_all(places, checked)
    except Exception as error:
        raise TornWeightsError(f"an update of weights was interrupted: {error}") from error
    if interrupt is not None:
        raise interrupt
    return checked


def _replace(
    places: WeightPlaces,
    pairs: Iterable[tuple[object, object]],
    allow_nonfinite: bool,
    must_have: Iterable[str] = (),
) -> dict[str, Tensor]:
    """Write one after the other; old weights are kept on the host until all are written."""
    kept: dict[str, Tensor] = {}
    output_layers = []
    finite = FiniteCheck(places.dtype)
    try:
        for given, tensor in pairs:
            name = places.name_of(given)
            if name is None:
                if places.is_tied(given):
                    # An iterator may reuse a tensor's memory when it continues.
                    output_layers.append(
                        tensor.to("cpu", copy=True) if isinstance(tensor, Tensor) else tensor
                    )
                continue
            _refuse_twice(name, kept)
            new = places.checked(name, tensor)
            finite.add(name, new)
            kept[name] = places.views[name].to("cpu", copy=True)
            # The host has just waited for the old weight: nothing is lost by looking now, and `new` may be
            # gone later.
            found = ((each, new) for each in finite.bad())
            refuse_nonfinite(found, places.dtype, place="", allowed=allow_nonfinite)
            places.views[name].copy_(new)
        if missing := sorted(set(must_have) - kept.keys()):
            more = f" and {len(missing) - 4} more" if len(missing) > 4 else ""
            raise WeightsError(f"weights missing: {', '.join(missing[:4])}{more}")
        for output in output_layers:
            is_given = places.embeddings in kept
            places.check_tied(output, places.views[places.embeddings] if is_given else None)
    except BaseException:
        _write_all(places, kept)
        raise
    return kept


def _write_all(places: WeightPlaces, tensors: Mapping[str, Tensor]) -> KeyboardInterrupt | None:
    """Write all, even if interrupted; returns the interrupt, to be raised afterwards."""
    left, interrupt = list(tensors.items()), None
    while left:
        try:
            name, tensor = left[-1]
            places.views[name].copy_(tensor)
            left.pop()
        except KeyboardInterrupt as stop:
            interrupt = stop
    return interrupt


def _refuse_twice(name: str, seen: Mapping[str, Tensor]) -> None:
    if name in seen:
        raise WeightsError(f"weight {name} is given twice")
