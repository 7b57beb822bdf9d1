"""Captured graphs read fixed addresses. This is the book of those addresses, and the check that they hold."""

from collections.abc import Callable, Mapping
from typing import TypeAlias

import torch

from ..errors import AddressError

NamedTensors: TypeAlias = Mapping[str, torch.Tensor]
Watched: TypeAlias = NamedTensors | torch.nn.Module | Callable[[], NamedTensors]


def tensors_of(watched: Watched) -> dict[str, torch.Tensor]:
    """The tensors to watch, as they are now. A module is asked anew, so a replaced parameter is noticed."""
    if isinstance(watched, torch.nn.Module):
        return {**dict(watched.named_parameters()), **dict(watched.named_buffers())}
    return dict(watched() if callable(watched) else watched)


class AddressBook:
    """Where watched tensors were when the graphs were captured."""

    def __init__(self) -> None:
        self._sources: list[Watched] = []
        self._addresses: dict[str, int] = {}

    def watch(self, watched: Watched) -> None:
        """Note the addresses of these tensors and ask for them again at every check."""
        self._sources.append(watched)
        self._addresses.update({name: t.data_ptr() for name, t in tensors_of(watched).items()})

    def renew(self) -> None:
        """Take the present addresses as right (a new capture has just read them)."""
        self._addresses = {name: t.data_ptr() for name, t in self._now().items()}

    def check(self) -> None:
        """Raise AddressError, naming the tensors, if any has moved."""
        now = self._now()
        moved = [
            f"{name} (captured at {address:#x}, now "
            + (f"at {now[name].data_ptr():#x})" if name in now else "gone)")
            for name, address in self._addresses.items()
            if name not in now or now[name].data_ptr() != address
        ]
        if moved:
            raise AddressError(
                f"captured graphs still read the old memory of {', '.join(moved)}: update tensors in place "
                f"(copy_), or drop the graphs and capture anew (drop() and capture(), recapture())"
            )

    def _now(self) -> dict[str, torch.Tensor]:
        return {name: tensor for source in self._sources for name, tensor in tensors_of(source).items()}
