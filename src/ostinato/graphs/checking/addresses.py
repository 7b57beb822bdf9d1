"""Captured graphs read fixed addresses. This records those addresses and checks that they still hold."""

import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple, TypeAlias

import torch

from ..errors import AddressError
from ..memory import storage_address

NamedTensors: TypeAlias = Mapping[str, torch.Tensor]
Watched: TypeAlias = NamedTensors | torch.nn.Module | Callable[[], NamedTensors]


def tensors_of(watched: Watched) -> dict[str, torch.Tensor]:
    """The tensors to watch, as they are now, tied ones under each of their names. A module is read again each
    time, so that a replaced parameter is noticed."""
    if isinstance(watched, torch.nn.Module):
        parameters = watched.named_parameters(remove_duplicate=False)
        return {**dict(parameters), **dict(watched.named_buffers(remove_duplicate=False))}
    return dict(watched() if callable(watched) else watched)


class _Read(NamedTuple):
    """A tensor that trial runs used. Held weakly, so that it can be freed and is then noticed as missing."""

    tensor: "weakref.ref[torch.Tensor]"
    address: int
    looks: str


class AddressBook:
    """The addresses of watched tensors at the time of the capture. Each source has its own names."""

    def __init__(self) -> None:
        self._sources: list[Watched] = []
        self._addresses: list[dict[str, int]] = []
        self._reads: dict[int, _Read] = {}

    def watch(self, watched: Watched) -> None:
        """Record the addresses of these tensors, and read them again at every check."""
        self._sources.append(watched)
        self._addresses.append(_addresses_of(watched))

    def note_reads(self, tensors: Iterable[torch.Tensor]) -> None:
        """Record tensors that steps used, besides those watched by name."""
        for tensor in tensors:
            looks = f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
            self._reads[tensor.data_ptr()] = _Read(weakref.ref(tensor), tensor.data_ptr(), looks)

    def ignore_reads(self, tensors: Iterable[torch.Tensor]) -> None:
        """Do not watch these tensors, although steps read them."""
        for tensor in tensors:
            self._reads.pop(tensor.data_ptr(), None)

    @property
    def storages_read(self) -> set[int]:
        """Addresses of the storages that steps read."""
        tensors = (read.tensor() for read in self._reads.values())
        return {storage_address(tensor) for tensor in tensors if tensor is not None}

    @property
    def reads_hold(self) -> bool:
        """Whether the tensors that steps read, watched by name or not, are where they were."""
        return not self._reads or all(
            (tensor := read.tensor()) is not None and tensor.data_ptr() == read.address
            for read in self._reads.values()
        )

    def forget_reads(self) -> None:
        """Forget all of them, because no graph is left that used them."""
        self._reads.clear()

    def renew(self) -> None:
        """Accept the present addresses as correct: a new capture has just read them."""
        self._addresses = [_addresses_of(source) for source in self._sources]

    def check(self, or_else: str | None = None) -> None:
        """Raise AddressError, naming the tensors, if any has moved. `or_else`: what to do but keep them."""
        moved: list[str] = []
        known: set[int] = set()
        for source, addresses in zip(self._sources, self._addresses, strict=True):
            now = _addresses_of(source)
            known.update(addresses.values())
            moved += [
                _moved(name, address, now.get(name))
                for name, address in addresses.items()
                if now.get(name) != address
            ]
        for tensor, address, looks in self._reads.values():
            alive = tensor()
            if address not in known and (alive is None or alive.data_ptr() != address):
                now_at = None if alive is None else alive.data_ptr()
                moved.append(_moved(f"a tensor {looks} that the step reads", address, now_at))
        if moved:
            raise moved_error(moved) if or_else is None else moved_error(moved, or_else)


def moved_error(
    moved: Iterable[str],
    or_else: str = "drop the graphs and capture again (drop() and capture(), or recapture())",
) -> AddressError:
    """The error that says which tensors have moved, and what to do."""
    return AddressError(
        f"captured graphs still read the old memory of {', '.join(moved)}: update tensors in place "
        f"(copy_), or {or_else}"
    )


def _addresses_of(watched: Watched) -> dict[str, int]:
    return {name: tensor.data_ptr() for name, tensor in tensors_of(watched).items()}


def _moved(name: str, address: int, now: int | None) -> str:
    return f"{name} (captured at {address:#x}, now " + ("gone)" if now is None else f"at {now:#x})")
