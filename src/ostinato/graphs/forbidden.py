"""What a CUDA graph capture forbids: which calls, why, and what to write instead.

A dispatch mode sees ATen calls (`forbidden_op`). On a CPU some host reads make none (`tolist`, `numpy`,
printing), and of some the call says more than what it comes to (an index); a function mode sees those
(`forbidden_function`). A recording on the tape refuses the first such
call; the doctor lists all of them.
"""

from functools import cache
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from .memory import tensors_of

aten = torch.ops.aten

_READ = (
    "reads a tensor's value into Python, which would wait for the device: keep the value in a tensor "
    "(torch.where, masking) or read it after the replay"
)
_COPY_OUT = (
    "copies a tensor to host memory: return the tensor from the step and copy it after the replay, or copy "
    "into a buffer made before the capture"
)
_COPY_IN = (
    "copies host memory to the device: make the tensor there (torch.arange, torch.full), before the step, or "
    "pass it as an argument"
)
_PRINT = (
    "prints a tensor, which reads its values: return it and print it after the replay, or print its shape"
)
_HOST_DATA = (
    "creates a tensor from Python or NumPy data, which copies from host memory: create it before the capture "
    "and let the step read it, or build it on the device (torch.arange, torch.full)"
)

_NUMBER = (
    "copies a number from host memory to the device: use the number itself, or torch.full((), n, device=)"
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
_ONE_HOT = torch._C._nn.one_hot
_ISTFT = "checks on the host that its window is not zero anywhere: do it outside of the captured step"
_ISTFTS = {torch.istft, torch.Tensor.istft}
_INDEXES = {torch.Tensor.__getitem__, torch.Tensor.__setitem__}
_OF_PYTHON_DATA = {torch.tensor, torch.as_tensor, torch.asarray, torch.Tensor.new_tensor}
_CROSS_ENTROPY = torch.nn.functional.cross_entropy
_WEIGHTED_MEAN = (
    "picks the weights of the targets that count by a mask, so that a shape depends on values: take "
    'reduction="sum" and divide by weight[target].sum(), without targets that are ignored'
)
WATCHED_FUNCTIONS = frozenset(
    {*_REFUSED_FUNCTIONS, *_SPLITS, *_INDEXES, *_OF_PYTHON_DATA, _ONE_HOT, *_ISTFTS, _CROSS_ENTROPY}
)
"""Functions that `forbidden_function` has to see."""

_FOR_PYTHON = "returns the comparison of values to Python: use"
_CONVERGES = "waits for its solver, which reports to the host: do it outside of the captured step"
_DYNAMIC = "has a result whose shape depends on values:"
_REFUSED_OPS: dict[str, str] = {
    "aten::_local_scalar_dense": _READ,
    "aten::item": _READ,
    "aten::is_nonzero": _READ,
    "aten::_linalg_check_errors": "checks every row for errors, including padding: use the variant that "
    "returns them (torch.linalg.inv_ex, cholesky_ex, solve_ex, lu_factor_ex)",
    "aten::_linalg_svd": _CONVERGES,
    "aten::_linalg_eigh": _CONVERGES,
    "aten::linalg_eig": _CONVERGES,
    "aten::linalg_pinv": _CONVERGES,
    "aten::linalg_matrix_exp": _CONVERGES,
    "aten::linalg_lstsq": _CONVERGES,
    "aten::_ctc_loss": "reads the lengths on the host: do it outside of the captured step",
    "aten::_pack_padded_sequence": "reads lengths on the host: pack outside of the captured step",
    "aten::_nested_tensor_from_mask_left_aligned": f"{_FOR_PYTHON} padded tensors",
    "aten::equal": f"{_FOR_PYTHON} torch.eq(...).all(), which stays a tensor",
    "aten::allclose": f"{_FOR_PYTHON} torch.isclose(...).all(), which stays a tensor",
    "aten::nonzero": f"{_DYNAMIC} use torch.where with three arguments, or torch.nonzero_static",
    "aten::masked_select": f"{_DYNAMIC} use torch.where or multiply by the mask, which keep the shape",
    "aten::repeat_interleave": f"{_DYNAMIC} pass output_size=",
    "aten::bincount": f"{_DYNAMIC} use scatter_add_ into a buffer of fixed size",
}
_OUTSIDE = f"{_DYNAMIC} do it outside of the captured step"
_LIST_INDEX = (
    "copies the index from host memory: use a slice, or keep the index in a tensor made before the capture"
)
_HOST_INDEX = (
    "copies the index to the device: keep it there (register_buffer, .to(device) before the capture)"
)
_NUMBER_INDEX = (
    "reads the index into Python, which would wait for the device: use index_select, or give the index one "
    "dimension more (x[i.view(1)])"
)
_BOUND = (
    "reads the bound into Python, which would wait for the device: keep the whole row and mask it with "
    "torch.arange(...) < bound"
)
_CLASSES = "looks for the largest value, to know the number of classes: pass num_classes="
_NAMES = {
    "aten::_local_scalar_dense": "reading a value",
    "aten::_linalg_check_errors": "a function of torch.linalg",
    "aten::_linalg_svd": "torch.linalg.svd",
    "aten::_linalg_eigh": "torch.linalg.eigh",
    "aten::linalg_eig": "torch.linalg.eig",
    "aten::linalg_pinv": "torch.linalg.pinv",
    "aten::linalg_matrix_exp": "matrix_exp",
    "aten::linalg_lstsq": "torch.linalg.lstsq",
    "aten::_ctc_loss": "ctc_loss",
    "aten::_pack_padded_sequence": "pack_padded_sequence",
    "aten::_unique": "unique",
    "aten::_unique2": "unique",
}
"""What users call what ATen calls so."""
_MASK_READ = (
    "indexes with a boolean mask, so its shape depends on values: use torch.where, which keeps the shape"
)
_MASK_WRITE = (
    "writes tensors through a boolean mask, which reads its values: use torch.where (a number may be written)"
)
_FILL = "reads the number to fill with into Python, which would wait for the device: use torch.where"
_RANGE = "looks for the least and the largest value: pass min= and max="
_MOVES = (
    "would change the memory of a tensor that existed before the capture, but a graph reads and writes fixed "
    "addresses: give the tensor its final size beforehand, or write into it with copy_"
)

_MASKS = (torch.bool, torch.uint8)
_VALUE_TAGS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
_INDEX_READS = {aten.index, aten._unsafe_index}
_INDEX_WRITES = {aten.index_put_, aten.index_put, aten._index_put_impl_, aten._unsafe_index_put}
_LIFTS = {aten.lift_fresh, aten.lift}
_COPIES = {aten.copy_, aten._to_copy}
_FILLS = {aten.masked_fill, aten.masked_fill_, aten.index_fill, aten.index_fill_}
_LOOKED_AT = _INDEX_READS | _INDEX_WRITES | _LIFTS | _COPIES | _FILLS | {aten.histc}
_RESIZES = {"aten::resize_", "aten::resize_as_", "aten::set_"}


class Forbidden(NamedTuple):
    """Something that cannot be part of a CUDA graph."""

    what: str
    """The call."""
    why: str
    """What it does, and what to write instead; continues a sentence that begins with "it"."""

    def __str__(self) -> str:
        return f"{self.what} cannot be captured: it {self.why}"


class Seen(Protocol):
    """What a watcher knows of the memory that a step uses."""

    def is_known(self, tensor: torch.Tensor) -> bool:
        """Whether an earlier call of the step used or made this memory."""

    def is_inside(self, tensor: torch.Tensor) -> bool:
        """Whether an earlier call of the step made this memory."""


def _has_mask(indices: Any) -> bool:
    return any(index.dtype in _MASKS for index in tensors_of(indices))


def _fills_by_mask(indices: Any, value: torch.Tensor, seen: Seen) -> bool:
    """Returns whether writing through an index is filling by one mask with a number of the host's."""
    num_indices = sum(index is not None for index in indices)
    return num_indices == 1 and value.numel() == 1 and not _is_on_device(value, seen)


def _is_on_device(value: torch.Tensor, seen: Seen) -> bool:
    """Whether a number is in the device's memory. On a CPU: was computed in the step; what was there before,
    or was made of a number, may be in host memory, where it can be read."""
    return not value.is_cpu or seen.is_inside(value)


@cache
def _is_never_refused(func: Any) -> bool:
    """Whether `forbidden_op` has nothing to look at, whatever the arguments: so it is with most."""
    name, packet = func._schema.name, func.overloadpacket
    is_looked_at = packet in _LOOKED_AT or name in _RESIZES
    is_refused = name in _REFUSED_OPS or "unique" in name or not _VALUE_TAGS.isdisjoint(func.tags)
    return not is_looked_at and not is_refused


def forbidden_op(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], seen: Seen) -> Forbidden | None:
    """Whether an ATen call that is about to be made could not be part of a CUDA graph."""
    if _is_never_refused(func):
        return None
    name, packet = func._schema.name, func.overloadpacket
    plain = name.removeprefix("aten::")
    if packet in _INDEX_READS:
        return Forbidden("tensor[mask]", _MASK_READ) if _has_mask(args[1]) else None
    if packet in _INDEX_WRITES:
        is_refused = _has_mask(args[1]) and not _fills_by_mask(args[1], args[2], seen)
        return Forbidden("tensor[mask] = value", _MASK_WRITE) if is_refused else None
    if packet in _FILLS:
        value = args[-1] if len(args) > 2 else kwargs.get("value")
        is_read = isinstance(value, torch.Tensor) and _is_on_device(value, seen)
        return Forbidden(f"{packet.__name__} with a number in a tensor", _FILL) if is_read else None
    if packet is aten.histc:
        least, largest = (*args[2:4], 0, 0)[:2]
        return Forbidden("histc", _RANGE) if least == largest else None
    if packet in _LIFTS:
        is_data = args[0].dim() > 0 and args[0].numel() > 0 and not seen.is_known(args[0])
        return Forbidden("a tensor of host data", _HOST_DATA) if is_data else None
    if packet in _COPIES:
        return _crossing(packet, args, kwargs)
    if func is aten.repeat_interleave.Tensor and kwargs.get("output_size") is not None:
        return None
    if name in _RESIZES:
        return None if seen.is_inside(args[0]) else Forbidden(plain, _MOVES)
    return Forbidden(_NAMES.get(name, plain), _REFUSED_OPS.get(name, _OUTSIDE))


def _crossing(packet: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Forbidden | None:
    """A copy between host and device."""
    if packet is aten.copy_:
        to, source = args[0].device, args[1]
    else:
        to, source = kwargs.get("device") or args[0].device, args[0]
    if to.type == source.device.type or "meta" in (to.type, source.device.type):
        return None
    if to.type == "cpu":
        return Forbidden("a copy to the host", _COPY_OUT)
    return Forbidden("a copy from the host", _COPY_IN)


def forbidden_function(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Forbidden | None:
    """Whether one of `WATCHED_FUNCTIONS`, about to be called, could not be part of a CUDA graph."""
    why = _REFUSED_FUNCTIONS.get(func)
    if why is not None:
        return Forbidden(f"Tensor.{func.__name__}", why)
    if func in _SPLITS and any(isinstance(value, torch.Tensor) for value in (*args[1:], *kwargs.values())):
        return Forbidden("tensor_split", _READ)
    if func in _INDEXES:
        return _forbidden_index(args[0], args[1])
    if func in _OF_PYTHON_DATA:
        return _of_a_number(func, args, kwargs)
    if func in _ISTFTS:
        return Forbidden("istft", _ISTFT)
    if func is _CROSS_ENTROPY and _is_weighted_mean(*args, **kwargs):
        return Forbidden("cross_entropy with weight= and label_smoothing=", _WEIGHTED_MEAN)
    if func is _ONE_HOT and _classes(*args, **kwargs) < 0:
        return Forbidden("one_hot", _CLASSES)
    return None


def _forbidden_index(tensor: torch.Tensor, index: Any) -> Forbidden | None:
    """An index that is brought to the device, or to Python, first."""
    for part in index if isinstance(index, tuple) else (index,):
        if isinstance(part, slice):
            bounds = (part.start, part.stop, part.step)
            if any(isinstance(bound, torch.Tensor) and bound.device == tensor.device for bound in bounds):
                return Forbidden("tensor[start:end] with a bound in a tensor", _BOUND)
        elif isinstance(part, torch.Tensor):
            is_number = part.dim() == 0 and not part.is_floating_point() and part.dtype not in _MASKS
            if is_number and part.device == tensor.device:
                return Forbidden("tensor[number] with the number in a tensor", _NUMBER_INDEX)
            if part.dim() > 0 and part.is_cpu and not tensor.is_cpu:
                return Forbidden("tensor[index] with the index in host memory", _HOST_INDEX)
        elif _is_host_data(part):
            return Forbidden("tensor[list]", _LIST_INDEX)
    return None


def _is_host_data(value: Any) -> bool:
    """Returns whether an index is a list of numbers, or an array."""
    if isinstance(value, np.ndarray):
        return value.ndim > 0 and value.size > 0
    return isinstance(value, list) and bool(value) and all(map(_is_number_or_more, value))


def _is_number_or_more(value: Any) -> bool:
    return isinstance(value, int | np.integer | np.bool_) or _is_host_data(value)


def _of_a_number(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Forbidden | None:
    """A tensor of one number that is to be on the device: unlike one in host memory, which may take part in
    arithmetic there, it is copied. That of a list is found by the call that makes it."""
    is_method = func is torch.Tensor.new_tensor
    data = next(iter(args[is_method:]), kwargs.get("data", kwargs.get("obj")))
    if not isinstance(data, int | float | complex | np.number | np.bool_):
        return None
    device = kwargs.get("device") or (args[0].device if is_method else None)
    stays = device is None or (isinstance(device, str) and torch.device(device).type == "cpu")
    return None if stays else Forbidden("a tensor of a number", _NUMBER)


def one_hot_unchecked(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor | None:
    """The result of `one_hot` with a given number of classes; None if this is another call.

    Only on a CPU does torch's own look at the values, to check them.
    """
    if func is not _ONE_HOT or (classes := _classes(*args, **kwargs)) <= 0:
        return None
    index = args[0] if args else kwargs["input"]
    return (index.unsqueeze(-1) == torch.arange(classes, device=index.device)).long()


def _is_weighted_mean(
    input: Any,
    target: torch.Tensor,
    weight: torch.Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> bool:
    """Returns whether torch divides by the weights of targets that are classes. Where a dispatch mode looks
    on, it does so in another way, so that no ATen call shows it."""
    is_mean = reduction == "mean" if size_average is None and reduce is None else reduce is not False
    return weight is not None and label_smoothing > 0 and is_mean and not target.is_floating_point()


def _classes(input: Any, num_classes: int = -1) -> int:
    return num_classes
