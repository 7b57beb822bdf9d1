"""Named tensors from what trainers send: SGLang's lists and flattened buckets, vLLM's IPC handles."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .errors import TransferError
from .foreign_pickles import BucketEntry, decoded, described
from .foreign_tensors import cuda_tensor, dtype_named, dtype_of, sizes_of, tensor_of

Pairs = list[tuple[str, Tensor]]

LOAD_FORMATS = (None, "auto", "direct", "flattened_bucket")
"""SGLang's; since names are the checkpoint's, direct does the same as none."""


class Announced(NamedTuple):
    """A tensor that will be sent."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """The size of its contents."""
        return math.prod(self.shape) * self.dtype.itemsize


def announced(names: object, dtypes: object, shapes: object) -> list[Announced]:
    """Three lists merged into one."""
    named, typed, shaped = _listed(names), _listed(dtypes), _listed(shapes)
    if not len(named) == len(typed) == len(shaped):
        raise TransferError(
            "names, dtypes and shapes must have the same length, not "
            f"{len(named)}, {len(typed)} and {len(shaped)}"
        )
    return [
        Announced(_text(name), dtype_named(dtype), sizes_of(shape))
        for name, dtype, shape in zip(named, typed, shaped, strict=True)
    ]


def _listed(given: object) -> list[Any]:
    if not isinstance(given, list | tuple):
        raise TransferError(f"names, dtypes and shapes must be lists, not {type(given).__name__}")
    return list(given)


def sglang_tensors(payloads: object, load_format: object) -> Pairs:
    """For `update_weights_from_tensor`: one base64 string per rank, and this engine is one rank."""
    if load_format not in LOAD_FORMATS:
        raise TransferError(f"unknown load_format {load_format!r}: leave it out, or use flattened_bucket")
    if not isinstance(payloads, list | tuple) or len(payloads) != 1:
        count = len(payloads) if isinstance(payloads, list | tuple) else type(payloads).__name__
        raise TransferError(
            f"tensors must be a list with one item per rank, and this engine is one rank: not {count}"
        )
    payload = payloads[0]
    data = payload if isinstance(payload, bytes) else decoded(payload, "an item of serialized_named_tensors")
    found = described(data)
    if load_format == "flattened_bucket":
        return _bucket(found)
    if isinstance(found, dict):
        found = list(found.items())
    if not isinstance(found, list | tuple):
        raise TransferError(f"named tensors must be a list of pairs, not {type(found).__name__}")
    return [_pair(each) for each in found]


def _pair(given: object) -> tuple[str, Tensor]:
    if not isinstance(given, tuple | list) or len(given) != 2:
        raise TransferError("each named tensor must be a pair of a name and a tensor")
    return _text(given[0]), tensor_of(given[1], f"weight {_text(given[0])}")


def _bucket(given: object) -> Pairs:
    if not isinstance(given, dict) or given.keys() != {"flattened_tensor", "metadata"}:
        raise TransferError("a bucket must have exactly flattened_tensor and metadata")
    flat, entries = tensor_of(given["flattened_tensor"]), given["metadata"]
    if flat.ndim != 1 or not isinstance(entries, list | tuple):
        raise TransferError("a bucket must be a one-dimensional tensor with a list as its metadata")
    return [_of_bucket(flat, entry) for entry in entries]


def _of_bucket(flat: Tensor, entry: object) -> tuple[str, Tensor]:
    fields = entry.fields if isinstance(entry, BucketEntry) and hasattr(entry, "fields") else {}
    if not fields.keys() >= {"name", "shape", "dtype", "start_idx", "end_idx"}:
        raise TransferError("an entry of a bucket must have name, shape, dtype, start_idx and end_idx")
    one = Announced(_text(fields["name"]), dtype_of(fields["dtype"]), sizes_of(fields["shape"]))
    begin, end = sizes_of((fields["start_idx"], fields["end_idx"]))
    return one.name, cut_out(flat, begin, end, one)


def cut_out(flat: Tensor, begin: int, end: int, one: Announced) -> Tensor:
    """The tensor between two positions of a flat one."""
    if not begin <= end <= flat.numel():
        raise TransferError(f"weight {one.name} is at {begin} to {end}, outside its bucket of {flat.numel()}")
    if (end - begin) * flat.element_size() != one.num_bytes:
        raise TransferError(
            f"weight {one.name} of shape {list(one.shape)} takes {one.num_bytes:,} bytes, but the bucket has "
            f"{(end - begin) * flat.element_size():,} for it"
        )
    part = flat[begin:end]
    if part.storage_offset() * flat.element_size() % one.dtype.itemsize:
        part = part.clone()  # misaligned: bytes of another dtype precede it
    return part.view(one.dtype).view(one.shape)


def packed_tensors(flat: Tensor, entries: Sequence[Announced]) -> Pairs:
    """Tensors that lie one after the other in bytes."""
    found, begin = [], 0
    for one in entries:
        found.append((one.name, cut_out(flat, begin, begin + one.num_bytes, one)))
        begin += one.num_bytes
    return found


def vllm_tensors(update_info: dict[str, Any], device: torch.device, *, is_packed: bool) -> Pairs:
    """For vLLM's IPC transfer: each tensor, or one buffer with all, under the UUID of its GPU."""
    entries = announced(update_info.get("names"), update_info.get("dtype_names"), update_info.get("shapes"))
    pickled = update_info.get("ipc_handles_pickled")
    handles = update_info.get("ipc_handles") if pickled is None else described(
        decoded(pickled, "ipc_handles_pickled")
    )  # fmt: skip
    if device.type != "cuda":
        raise TransferError("IPC handles are for GPU memory, and this engine runs on a CPU")
    uuid = str(torch.cuda.get_device_properties(device).uuid)
    if not is_packed:
        if not isinstance(handles, list | tuple) or len(handles) != len(entries):
            raise TransferError(f"ipc_handles must be a list of {len(entries)}, one for each name")
        pairs = zip(entries, handles, strict=True)
        return [(one.name, _as_announced(_on_gpu(each, uuid, device), one)) for one, each in pairs]
    sizes = sizes_listed(update_info.get("tensor_sizes"))
    if sizes != [one.num_bytes for one in entries]:
        raise TransferError("tensor_sizes do not match names, dtypes and shapes")
    flat = _on_gpu(handles, uuid, device).view(-1).view(torch.uint8)
    return packed_tensors(flat[: sum(sizes)], entries)


def sizes_listed(given: object) -> list[int]:
    """A list of sizes, checked."""
    if not isinstance(given, list | tuple) or not all(type(each) is int and each >= 0 for each in given):
        raise TransferError("tensor_sizes must be a list of numbers of bytes, one for each name")
    return list(given)


def _as_announced(tensor: Tensor, one: Announced) -> Tensor:
    if (tensor.dtype, tuple(tensor.shape)) != (one.dtype, one.shape):
        raise TransferError(
            f"weight {one.name} was announced as {one.dtype} {list(one.shape)} but is {tensor.dtype} "
            f"{list(tensor.shape)}"
        )
    return tensor


def _on_gpu(handles: object, uuid: str, device: torch.device) -> Tensor:
    if not isinstance(handles, dict) or uuid not in handles:
        known = ", ".join(map(str, handles)) if isinstance(handles, dict) else type(handles).__name__
        raise TransferError(f"there is no handle for this engine's GPU {uuid}, only for {known}")
    arguments = handles[uuid]
    if not isinstance(arguments, tuple | list) or len(arguments) != 15:
        raise TransferError("an IPC handle must be the 15 arguments of torch's rebuild_cuda_tensor")
    # The index is the sender's, who may see other devices than we do.
    return cuda_tensor([*arguments[:6], device.index, *arguments[7:]])


def _text(given: object) -> str:
    if not isinstance(given, str):
        raise TransferError(f"a weight's name must be a string, not {type(given).__name__}")
    return given
