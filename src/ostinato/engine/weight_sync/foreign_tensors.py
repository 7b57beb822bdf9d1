"""Tensors in the memory of another process: on a CPU through shared memory or as bytes, on a GPU by CUDA IPC.

Built from descriptions (`foreign_pickles`), with every number checked against the actual memory: torch trusts
whoever reduced a tensor, and would grow a file or read past its end.
"""

from __future__ import annotations

import io
import os
import re
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .errors import TransferError
from .foreign_pickles import DTYPES, Call, Name, SharedDescriptor

_SHARED_FILE = re.compile(rb"/torch_[0-9]{1,10}_[0-9]{1,20}_[0-9]{1,20}")
_MANAGER = re.compile(rb"(/[A-Za-z0-9._+-]+)*/torch-shm-dir-[A-Za-z0-9]+/manager\.sock")
_LISTENER = re.compile(r"(/[A-Za-z0-9._+-]+)*/listener-[A-Za-z0-9_]+")
_HEADER_BYTES = 64
"""Precedes the contents of a shared file: the count of its users."""
_IPC_COUNTERS = 10_000
"""The entries in the file in which torch counts the users of CUDA memory."""
_MAX_DIMENSIONS = 8


def tensor_of(given: object, what: str = "a tensor") -> Tensor:
    """The described tensor, in the memory where it lies. Raises TransferError if that memory does not exist
    or is too small. The lender may write to it again at any time."""
    if not isinstance(given, Call):
        raise TransferError(f"{what} must be a tensor, not {_kind(given)}")
    match given.function.name, given.arguments:
        case "rebuild_tensor", (Name(), storage, (offset, size, stride, bool())):
            return _view(*_typed(storage), offset, size, stride)
        case "_rebuild_tensor_v2", (storage, offset, size, stride, bool(), *_):
            return _view(*_typed(storage), offset, size, stride)
        case "_rebuild_parameter", (inner, bool(), *_):
            return tensor_of(inner, what)
        case (("rebuild_cuda_tensor" | "_rebuild_cuda_tensor_modified"), arguments):
            return cuda_tensor(arguments)
    raise TransferError(f"{what}: {given.function.name} has unexpected arguments")


def dtype_of(given: object) -> torch.dtype:
    """The dtype that a pickle names."""
    if isinstance(given, Name) and given.module == "torch" and given.name in DTYPES:
        found: torch.dtype = getattr(torch, given.name)
        return found
    raise TransferError(f"a dtype must be one of torch's, not {_kind(given)}")


def dtype_named(name: object) -> torch.dtype:
    """The dtype of this name, with or without `torch.` in front."""
    short = name.removeprefix("torch.") if isinstance(name, str) else None
    if short not in DTYPES:
        raise TransferError(f"unknown dtype {name!r}: use one of {', '.join(DTYPES)}")
    found: torch.dtype = getattr(torch, short)
    return found


def sizes_of(given: object) -> tuple[int, ...]:
    """A shape or strides, from a torch.Size, a list or a tuple."""
    if isinstance(given, Call) and given.function == Name("torch", "Size") and len(given.arguments) == 1:
        given = given.arguments[0]
    if not isinstance(given, tuple | list) or len(given) > _MAX_DIMENSIONS:
        raise TransferError(
            f"a shape must be a list of at most {_MAX_DIMENSIONS} integers, not {_kind(given)}"
        )
    return tuple(_number(each) for each in given)


def cuda_tensor(arguments: Sequence[Any]) -> Tensor:
    """A tensor from the arguments of torch's `rebuild_cuda_tensor`; `device` is an index or a GPU's UUID."""
    if len(arguments) != 15:
        raise TransferError(f"a tensor on a GPU needs 15 arguments, not {len(arguments)}")
    _, size, stride, offset, _, dtype, device, handle, num_bytes, begin, _, *shared = arguments
    counter_file, counter, event, must_wait = shared
    kind, shape, strides = dtype_of(dtype), sizes_of(size), sizes_of(stride)
    _check_inside(shape, strides, _number(offset), kind.itemsize, _number(num_bytes))
    index = _device_index(device)
    if not num_bytes or handle is None:
        return torch.empty(shape, dtype=kind, device=torch.device("cuda", index))
    is_counted = isinstance(counter_file, bytes) and _SHARED_FILE.fullmatch(counter_file)
    if not is_counted or not _number(counter) < _IPC_COUNTERS:
        raise TransferError("the handle lacks torch's count of the GPU memory's users")
    if not isinstance(handle, bytes) or not isinstance(event, bytes) or not isinstance(must_wait, bool):
        raise TransferError(
            "the handle of GPU memory is malformed: handle and event must be bytes, must_wait a boolean"
        )
    from torch.multiprocessing.reductions import rebuild_cuda_tensor

    typed = torch.storage.TypedStorage
    try:
        found: Tensor = rebuild_cuda_tensor(
            *(torch.Tensor, torch.Size(shape), strides, offset, typed, kind, index),
            *(handle, num_bytes, _number(begin), False, counter_file, counter, event, must_wait),
        )
    except RuntimeError as error:
        raise TransferError(
            f"GPU memory of another process cannot be opened on GPU {index}: {error}. That process must be "
            "alive, on this machine, and not the engine itself"
        ) from None
    _check_allocation(found)
    return found


def _view(memory: torch.UntypedStorage, dtype: torch.dtype, offset: Any, size: Any, stride: Any) -> Tensor:
    shape, strides = sizes_of(size), sizes_of(stride)
    _check_inside(shape, strides, _number(offset), dtype.itemsize, memory.nbytes())
    return torch.empty(0, dtype=dtype).set_(memory, offset, shape, strides)  # type: ignore[call-overload,no-any-return]


def _typed(given: object) -> tuple[torch.UntypedStorage, torch.dtype]:
    match given:
        case Call(Name(_, "rebuild_typed_storage"), (storage, dtype)):
            return _storage(storage), dtype_of(dtype)
        case Call(Name(_, "_load_from_bytes"), (bytes() as contents,)):
            return _loaded(contents)
    raise TransferError("unknown description of a tensor's memory")


def _loaded(contents: bytes) -> tuple[torch.UntypedStorage, torch.dtype]:
    try:
        found = torch.load(io.BytesIO(contents), map_location="cpu", weights_only=True)
    except Exception as error:
        raise TransferError(f"a tensor's bytes cannot be read: {type(error).__name__}: {error}") from None
    if not isinstance(found, torch.storage.TypedStorage):
        raise TransferError(f"a tensor's bytes must hold a storage, not {_kind(found)}")
    return found._untyped_storage, found.dtype


def _storage(given: object) -> torch.UntypedStorage:
    match given:
        case Call(Name(_, "rebuild_storage_empty"), (Name(),)):
            return torch.UntypedStorage(0)
        case Call(Name(_, "rebuild_storage_filename"), (Name(), manager, file, num_bytes)):
            return _of_file(manager, file, _number(num_bytes))
        case Call(Name(_, "rebuild_storage_fd"), (Name(), SharedDescriptor() as shared, num_bytes)):
            return _of_descriptor(shared, _number(num_bytes))
    raise TransferError("unknown description of a tensor's memory")


def _of_file(manager: object, file: object, num_bytes: int) -> torch.UntypedStorage:
    """Memory that torch shares by file name (sharing strategy file_system)."""
    is_manager = isinstance(manager, bytes) and _MANAGER.fullmatch(manager)
    if not is_manager or not isinstance(file, bytes) or not _SHARED_FILE.fullmatch(file):
        raise TransferError("the name of the shared memory is not one that torch gives")
    try:
        there = os.stat(f"/dev/shm{os.fsdecode(file)}").st_size - _HEADER_BYTES
    except OSError as error:
        raise TransferError(f"shared memory {os.fsdecode(file)} does not exist here: {error}") from None
    _check_size(there, num_bytes)
    try:
        # The sender has already counted us as a user; this call tells torch that we have taken our place.
        found: Any = torch.UntypedStorage._new_shared_filename_cpu(manager, file, num_bytes)
        counted: torch.UntypedStorage = found._shared_decref()
        return counted
    except RuntimeError as error:
        raise TransferError(f"shared memory {os.fsdecode(file)} cannot be opened: {error}") from None


def _of_descriptor(shared: SharedDescriptor, num_bytes: int) -> torch.UntypedStorage:
    """Memory whose file descriptor another process hands out (sharing strategy file_descriptor)."""
    import multiprocessing.connection
    import multiprocessing.reduction

    match getattr(shared, "fields", None):
        case {"_id": (str() as address, int() as key)} if _LISTENER.fullmatch(address):
            pass
        case _:
            raise TransferError("the shared file descriptor has no valid address")
    try:
        authkey = multiprocessing.current_process().authkey
        with multiprocessing.connection.Client(address, family="AF_UNIX", authkey=authkey) as sender:
            sender.send((key, os.getpid()))
            descriptor = multiprocessing.reduction.recv_handle(sender)
    except (OSError, EOFError, RuntimeError, multiprocessing.AuthenticationError) as error:
        raise TransferError(
            f"cannot get the trainer's file descriptor: {type(error).__name__}: {error}. Only a process "
            "with the same authkey gets it: in the trainer, call "
            "torch.multiprocessing.set_sharing_strategy('file_system')"
        ) from None
    try:
        _check_size(os.fstat(descriptor).st_size, num_bytes)
        found: torch.UntypedStorage = torch.UntypedStorage._new_shared_fd_cpu(descriptor, num_bytes)  # type: ignore[attr-defined]
        return found
    except RuntimeError as error:
        raise TransferError(f"shared memory cannot be opened: {error}") from None
    finally:
        os.close(descriptor)


def _check_size(there: int, said: int) -> None:
    if there < said:
        raise TransferError(f"shared memory has {max(there, 0):,} bytes, fewer than the announced {said:,}")


def _check_inside(shape: Sequence[int], strides: Sequence[int], offset: int, item: int, there: int) -> None:
    if len(shape) != len(strides):
        raise TransferError(f"{len(shape)} dimensions have {len(strides)} strides")
    if 0 in shape:
        return
    last = offset + sum((count - 1) * stride for count, stride in zip(shape, strides, strict=True))
    if (last + 1) * item > there:
        raise TransferError(f"a tensor ends at byte {(last + 1) * item:,}, but its memory has {there:,}")


def _check_allocation(tensor: Tensor) -> None:
    """Raise TransferError if the memory behind a handle is smaller than announced."""
    from cuda.bindings import driver

    storage = tensor.untyped_storage()
    error, base, size = driver.cuMemGetAddressRange(storage.data_ptr())
    # The driver knows no range for memory that torch mapped piece by piece (expandable segments).
    is_known = error == driver.CUresult.CUDA_SUCCESS
    if is_known and storage.data_ptr() + storage.nbytes() > int(base) + size:
        raise TransferError(f"memory of another process ends before the announced {storage.nbytes():,} bytes")


def _device_index(given: object) -> int:
    count = torch.cuda.device_count()
    if isinstance(given, str):
        wanted = given.removeprefix("GPU-")
        for index in range(count):
            if str(torch.cuda.get_device_properties(index).uuid) == wanted:
                return index
        raise TransferError(f"this engine sees no GPU {given}")
    if _number(given) >= count:
        raise TransferError(f"this engine sees no GPU {given}, only {count}")
    return _number(given)


def _number(given: object) -> int:
    if not isinstance(given, int) or isinstance(given, bool) or not 0 <= given < 2**62:
        raise TransferError(f"a size or an offset must be an integer of at least 0, not {_kind(given)}")
    return given


def _kind(given: object) -> str:
    return repr(given) if isinstance(given, int | bool | None) else type(given).__name__
