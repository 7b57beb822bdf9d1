"""Where the parameters and buffers of a model are, and what else of it a graph relies on."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import torch

from ..blame import calling_line
from ..dispatch_mode import WatchingMode
from ..journal import WriteJournal, writes, written_arguments
from ..memory import storage_address, tensor_over
from ..wrapping.holders import item_of
from ..wrapping.standing import Comparison


class _Place(NamedTuple):
    holder: Any
    key: str
    tensor: torch.Tensor
    address: int
    name: str


class Places:
    """Recorded when graphs are captured, checked before every replay."""

    def __init__(self, modules: Sequence[torch.nn.Module]) -> None:
        self._modules = modules
        self._places: list[_Place] | None = None
        self._still: Callable[[], bool] = lambda: True

    @property
    def known(self) -> bool:
        """Whether there is anything to compare with."""
        return self._places is not None

    def note(self) -> None:
        """Record the present places as those that graphs read."""
        self._places = list(self._now())
        tensors = [place.tensor for place in self._places]
        comparison = Comparison()
        comparison.add_places((place.holder, place.key, place.tensor) for place in self._places)
        comparison.add_equal(lambda: list(map(torch.Tensor.data_ptr, tensors)))
        self._still = comparison.compiled()

    def forget(self) -> None:
        """Forget the places: no graph reads them."""
        self._places = None

    def _now(self) -> Iterator[_Place]:
        for root in self._modules:
            for path, module in root.named_modules():
                for table in (module._parameters, module._buffers):
                    # TorchScript makes its tables anew whenever they are asked for: look at attributes.
                    holder = table if isinstance(table, dict) else module
                    for key, tensor in table.items():
                        if tensor is not None:
                            name = f"{path}.{key}" if path else key
                            yield _Place(holder, key, tensor, tensor.data_ptr(), name)

    def moved(self) -> list[str]:
        """What has moved, by name."""
        if self._places is None or self._still():
            return []
        return [
            name
            for holder, key, tensor, address, name in self._places
            if item_of(holder, key) is not tensor or tensor.data_ptr() != address
        ]

    def buffers(self) -> dict[str, torch.Tensor]:
        """Tensors that a forward pass may change."""
        found = [dict(module.named_buffers(prefix=str(i))) for i, module in enumerate(self._modules)]
        return {name: tensor for buffers in found for name, tensor in buffers.items()}

    def parameters_besides(self, parameters: Sequence[torch.Tensor]) -> list[tuple[str, torch.Tensor]]:
        """Those that are not among these, with their names."""
        known = set(parameters)
        found = [named for root in self._modules for named in root.named_parameters()]
        return [(name, parameter) for name, parameter in found if parameter not in known]

    def names_of(self, parameters: Sequence[torch.Tensor]) -> list[tuple[str, torch.Tensor]]:
        """These parameters with their names, in the order of the modules: the norm of all gradients, a sum,
        then equals that of `clip_grad_norm_(model.parameters())` to the last bit."""
        names: dict[torch.Tensor, str] = {
            p: name for root in self._modules for name, p in root.named_parameters()
        }
        wanted = set(parameters)
        own = [(name, p) for p, name in names.items() if p in wanted]
        return own + [(f"parameter {number}", p) for number, p in enumerate(parameters) if p not in names]


class Written(NamedTuple):
    """What a step writes by itself when it runs."""

    tensors: dict[str, torch.Tensor]
    generators: tuple[torch.Generator, ...]


def written_by(run: Callable[[], object], besides: Iterable[torch.Tensor]) -> Written:
    """Everything written that existed before, for example by an embedding with `max_norm`, an encoder that
    follows another one, a mean kept by a loss function, or its own generators. The run is undone."""
    journal = WriteJournal()
    try:
        with journal:
            run()
    except Exception:  # code that must not be watched raises; real failures recur
        return Written({}, ())
    finally:
        journal.undo()
    known = {storage_address(tensor) for tensor in besides}
    found = [tensor for tensor in journal.written_tensors if storage_address(tensor) not in known]
    return Written(
        {f"written {number}": _whole(t) for number, t in enumerate(found)}, tuple(journal.generators)
    )


class _WritingLines(WatchingMode):
    def __init__(self, names: Mapping[int, str]) -> None:
        super().__init__()
        self._names = names
        self.found: dict[str, str] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for tensor in written_arguments(func, args, kwargs or {}) if writes(func) else ():
            name = self._names.get(storage_address(tensor))
            if name is not None and name not in self.found and (line := calling_line()) is not None:
                self.found[name] = line
        return func(*args, **(kwargs or {}))


def writing_lines(run: Callable[[], object], tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """The first line of the user's that writes to each of these tensors."""
    watching = _WritingLines({storage_address(tensor): name for name, tensor in tensors.items()})
    with suppress(Exception), watching:
        run()
    return watching.found


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    """All of a storage: the tensor seen first may be only a part of it."""
    storage = tensor.untyped_storage()
    length = storage.nbytes() // tensor.itemsize
    return tensor_over(storage, tensor.dtype, (length,), (1,))
