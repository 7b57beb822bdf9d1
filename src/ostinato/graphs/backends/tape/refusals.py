"""What a CUDA graph capture forbids, refused at the line of user code that does it.

A dispatch mode sees ATen calls. On a CPU some host reads make none (`tolist`, `numpy`, printing), so a
function mode watches for those.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from ...blame import calling_line
from ...errors import CaptureError
from ...memory import tensors_of
from .storages import StorageTable

aten = torch.ops.aten

_READ = (
    "reads a tensor's value into Python, which would wait for the device: keep the value in a tensor "
    "(torch.where, masking) or read it after the replay"
)
_COPY_OUT = (
    "copies a tensor to host memory: return the tensor from the step and copy it after the replay, or copy "
    "into a buffer made before the capture"
)
_PRINT = (
    "prints a tensor, which reads its values: return it and print it after the replay, or print its shape"
)
_HOST_DATA = (
    "creates a tensor from Python or NumPy data, which copies from host memory: create it before the capture "
    "and let the step read it, or build it on the device (torch.arange, torch.full)"
)

_REFUSED_FUNCTIONS = {
    getattr(torch.Tensor, name): why
    for why, names in {
        _READ: "item tolist __bool__ __int__ __float__ __complex__ __index__ __contains__",
        _COPY_OUT: "numpy __array__ cpu",
        _PRINT: "__repr__ __format__",
    }.items()
    for name in names.split()
}

_SPLITS = {torch.tensor_split, torch.Tensor.tensor_split}
_WATCHED_FUNCTIONS = {*_REFUSED_FUNCTIONS, *_SPLITS, torch._C._nn.one_hot}

_FOR_PYTHON = "returns the comparison of values to Python: use"
_DYNAMIC = "has a result whose shape depends on values:"
_REFUSED_OPS: dict[str, str] = {
    "aten::_local_scalar_dense": _READ,
    "aten::item": _READ,
    "aten::is_nonzero": _READ,
    "aten::_linalg_check_errors": "checks every row for errors, including padding: use the variant that "
    "returns them (torch.linalg.inv_ex, cholesky_ex, solve_ex, lu_factor_ex)",
    "aten::_pack_padded_sequence": "reads lengths on the host: pack outside of the captured step",
    "aten::equal": f"{_FOR_PYTHON} torch.eq(...).all(), which stays a tensor",
    "aten::allclose": f"{_FOR_PYTHON} torch.isclose(...).all(), which stays a tensor",
    "aten::nonzero": f"{_DYNAMIC} use torch.where with three arguments, or torch.nonzero_static",
    "aten::masked_select": f"{_DYNAMIC} use torch.where or multiply by the mask, which keep the shape",
    "aten::repeat_interleave": f"{_DYNAMIC} pass output_size=",
    "aten::bincount": f"{_DYNAMIC} use scatter_add_ into a buffer of fixed size",
}
_UNIQUE = f"{_DYNAMIC} do it outside of the captured step"
_MASK_READ = (
    "indexes with a boolean mask, so its shape depends on values: use torch.where, which keeps the shape"
)
_MASK_WRITE = "writes through a boolean mask, which reads its values: use masked_fill_ or torch.where"
_MOVES = (
    "would change the memory of a tensor that existed before the capture, but a graph reads and writes fixed "
    "addresses: give the tensor its final size beforehand, or write into it with copy_"
)

_VALUE_TAGS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
_INDEX_READS = {aten.index, aten._unsafe_index}
_INDEX_WRITES = {aten.index_put_, aten.index_put, aten._index_put_impl_, aten._unsafe_index_put}
_LIFTS = {aten.lift_fresh, aten.lift}
_RESIZES = {"aten::resize_", "aten::resize_as_", "aten::set_"}


def refuse(what: str, why: str) -> CaptureError:
    return CaptureError(f"{what} cannot be captured: it {why}", where=calling_line())


def _has_mask(indices: Any) -> bool:
    return any(index.dtype in (torch.bool, torch.uint8) for index in tensors_of(indices))


@cache
def _is_never_refused(func: Any) -> bool:
    """Whether `check_op` has nothing to look at, whatever the arguments: so it is with most."""
    name, packet = func._schema.name, func.overloadpacket
    is_looked_at = packet in _INDEX_READS | _INDEX_WRITES | _LIFTS or name in _RESIZES
    is_refused = name in _REFUSED_OPS or "unique" in name or not _VALUE_TAGS.isdisjoint(func.tags)
    return not is_looked_at and not is_refused


def check_op(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], storages: StorageTable) -> None:
    """Raise if an ATen call could not be part of a CUDA graph."""
    if _is_never_refused(func):
        return
    name, packet = func._schema.name, func.overloadpacket
    if packet in _INDEX_READS:
        if _has_mask(args[1]):
            raise refuse("tensor[mask]", _MASK_READ)
    elif packet in _INDEX_WRITES:
        if _has_mask(args[1]):
            raise refuse("tensor[mask] = value", _MASK_WRITE)
    elif packet in _LIFTS:
        if args[0].dim() > 0 and args[0].numel() > 0 and storages.known(args[0]) is None:
            raise refuse("a tensor of host data", _HOST_DATA)
    elif func is aten.repeat_interleave.Tensor and kwargs.get("output_size") is not None:
        return
    elif name in _REFUSED_OPS:
        raise refuse(name.removeprefix("aten::"), _REFUSED_OPS[name])
    elif "unique" in name or not _VALUE_TAGS.isdisjoint(func.tags):
        raise refuse(name.removeprefix("aten::"), _UNIQUE)
    elif name in _RESIZES and not storages.is_inside(args[0]):
        raise refuse(name.removeprefix("aten::"), _MOVES)


def _classes(index: torch.Tensor, num_classes: int = -1) -> int:
    return num_classes


class RefusalMode(TorchFunctionMode):
    """Refuses host reads that make no ATen call."""

    def __init__(self, is_active: Callable[[], bool]) -> None:
        super().__init__()
        self._is_active = is_active

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in _WATCHED_FUNCTIONS or not self._is_active():
            return func(*args, **kwargs) if kwargs else func(*args)
        kwargs = kwargs or {}
        why = _REFUSED_FUNCTIONS.get(func)
        if why is not None:
            raise refuse(f"Tensor.{func.__name__}", why)
        if func in _SPLITS and any(
            isinstance(value, torch.Tensor) for value in (*args[1:], *kwargs.values())
        ):
            raise refuse("tensor_split", _READ)
        if func is torch._C._nn.one_hot and _classes(*args, **kwargs) > 0:
            # Only on a CPU does it look at the values, to check them.
            index, classes = args[0], _classes(*args, **kwargs)
            return (index.unsqueeze(-1) == torch.arange(classes, device=index.device)).long()
        return func(*args, **kwargs)


@contextmanager
def answering_capture_queries(is_active: Callable[[], bool]) -> Iterator[None]:
    """Make `torch.cuda.is_current_stream_capturing()` tell this thread that it is recording."""
    original = torch.cuda.is_current_stream_capturing
    owner = threading.get_ident()

    def is_current_stream_capturing() -> bool:
        return is_active() if threading.get_ident() == owner else original()

    modules: tuple[Any, ...] = (torch.cuda, torch.cuda.graphs)
    before = [module.is_current_stream_capturing for module in modules]
    for module in modules:
        module.is_current_stream_capturing = is_current_stream_capturing
    try:
        yield
    finally:
        for module, function in zip(modules, before, strict=True):
            module.is_current_stream_capturing = function
