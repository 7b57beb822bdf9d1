"""A kernel in CUDA C++ from source to launch: compiled by NVRTC, kept on disk, launched on torch's stream.

The sources lie in the folders of their operations; beside this file are `device.cuh` and `warpgroup.cuh`,
which alone have PTX. They include nothing else, so that NVRTC needs no headers of a toolkit, and get their
constants as macros. Names of files are unique.

Compiled kernels are kept in Triton's cache folder, beside Triton's own: code, then a checksum, so that no
file is loaded that is cut off, changed or another's.

Registers, shared memory and spills of a kernel, on any machine with NVRTC:

    python -m ostinato.kernels.cuda.compiled few_tokens.cu ROWS=8 ...
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import re
import struct
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..on_chip_memory import ALL_SHARED, prefer

logger = logging.getLogger("ostinato.kernels")

_FOLDER = Path(__file__).parents[1]
"""Of all operations."""
_MAX_STATIC_SHARED = 48 << 10
_KEPT_FORMAT = "code, then SHA-256 of key and code"
"""Belongs to the key, so that files of another format have other names."""
_UNROLLED = {"prompt_attention.cu": 4}
"""Sources whose characters take so many times as long to compile as those of others: 42 to 66 microseconds
each for attention of prompts, 11 to 22 for products and decode attention."""


@dataclass(frozen=True)
class TileMap:
    """A matrix as a kernel copies it, in boxes (`TensorMap` in `warpgroup.cuh`); its rows may lie apart.

    Or a tensor of up to five dimensions.
    """

    matrix: Tensor
    box: tuple[int, ...]
    """Rows and columns, or a size for each dimension."""


Argument = Tensor | TileMap | int | float
"""Of a launch: the address of a tensor's data, a tensor map, an int32 or a float32."""


class CudaError(RuntimeError):
    """NVRTC or the driver refused something."""


class ColdCudaError(CudaError):
    """Something would be made while a graph is captured: the step must have run once before."""

    is_cold = True
    """For whoever captures: a run of the step, and it can be captured."""


@cache
def is_supported(device: torch.device) -> bool:
    """Tells whether CUDA C++ kernels run: on Hopper and on data centres' Blackwell."""
    return why_unsupported(device) is None


def why_unsupported(device: torch.device) -> str | None:
    """Returns what keeps CUDA C++ kernels from a device; None if nothing does."""
    if device.type != "cuda":
        return f"kernels in CUDA C++ do not run on {device}"
    major, minor = torch.cuda.get_device_capability(device)
    if major not in (9, 10):
        return f"kernels in CUDA C++ need clusters and 227 KiB of shared memory, sm_{major}{minor} has less"
    return None if has_nvrtc() else "kernels in CUDA C++ need NVRTC and cuda-bindings to be installed"


def has_warpgroup_products(device: torch.device) -> bool:
    """Tells whether kernels with wgmma run (`warpgroup.cuh`): on Hopper alone."""
    return is_supported(device) and torch.cuda.get_device_capability(device)[0] == 9


@cache
def has_nvrtc() -> bool:
    """Tells whether NVRTC and NVIDIA's Python bindings are installed; torch for CUDA brings both."""
    try:
        from cuda.bindings import nvrtc

        nvrtc.nvrtcVersion()
    except (ImportError, RuntimeError):
        return False
    return True


@cache
def cuda_kernel(file: str, entry: str, **constants: int) -> CudaKernel:
    """Returns the kernel `entry` of a source with these constants; the same one for the same constants."""
    return CudaKernel(file, entry, constants)


class CudaKernel:
    """One kernel, compiled and loaded when it is first launched on a device."""

    def __init__(self, file: str, entry: str, constants: dict[str, int]) -> None:
        self._file, self._entry, self._constants = file, entry, constants
        self._functions: dict[int, Any] = {}
        self._configs: dict[Any, Any] = {}

    @property
    def compile_cost(self) -> int:
        """Estimates the time of a compilation, in characters of a usual source."""
        return _UNROLLED.get(self._file, 1) * sum(map(len, _with_includes(self._file).values()))

    def launch(
        self,
        *,
        grid: tuple[int, int, int],
        block: int,
        args: Sequence[Argument],
        shared_bytes: int = 0,
        cluster: int = 1,
        dependent: bool = True,
        shared_share: int = ALL_SHARED,
    ) -> None:
        """Queue it on torch's current stream of the current device.

        `cluster`: that many neighbours in x run at the same time and see each other's shared memory.
        `dependent`: it may start before the previous kernel ends, and waits by itself (`wait_for_previous`).
        `shared_share`: see `on_chip_memory`; what the first launch on a device says.
        """
        device = torch.cuda.current_device()
        function = self._functions.get(device)
        if (postponed := _postponed()) is not None:
            if function is None:
                postponed[self] = shared_bytes, shared_share
            return
        if function is None:
            if torch.cuda.is_current_stream_capturing():
                raise ColdCudaError(f"{self._entry} is launched for the first time while a graph is captured")
            function = self.load(device, shared_bytes, shared_share)
        # By stream, which another thread may not change between here and the launch.
        stream = torch._C._cuda_getCurrentRawStream(device)  # type: ignore[attr-defined]
        key = grid, block, shared_bytes, cluster, dependent, stream
        config = self._configs.get(key)
        if config is None:
            config = self._configs[key] = _launch_config(*key)
        values = (ctypes.c_uint64 * len(args))(*map(_as_word, args))
        first = ctypes.addressof(values)
        places = (ctypes.c_void_p * len(args))(*range(first, first + 8 * len(args), 8))
        maps = [(i, _encoded_map(arg)) for i, arg in enumerate(args) if isinstance(arg, TileMap)]
        for i, encoded in maps:
            places[i] = encoded.address
        _check(_driver().cuLaunchKernelEx(config, function, ctypes.addressof(places), 0))

    def load(self, device: int, shared_bytes: int, shared_share: int) -> Any:
        """Compile it unless that is on disk, and put it on the device."""
        driver = _driver()
        with torch.cuda.device(device):
            torch.cuda.current_stream().query()  # makes the context
            module = _check(driver.cuModuleLoadData(self.compile(torch.cuda.get_device_capability(device))))
            function = _check(driver.cuModuleGetFunction(module, self._entry.encode()))
            if shared_bytes > _MAX_STATIC_SHARED:
                most = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
                _check(driver.cuFuncSetAttribute(function, most, shared_bytes))
            prefer(function, shared_share)
        self._functions[device] = function
        return function

    def compile(self, capability: tuple[int, int]) -> bytes:
        """Machine code for GPUs of this compute capability; from disk if it was compiled before."""
        code_of_file = source(self._file)
        options = _options(capability, self._constants)
        key = "\n".join([_KEPT_FORMAT, _nvrtc_version(), *options, *_headers().values(), code_of_file])
        kept = _cache_folder() / f"{Path(self._file).stem}-{hashlib.sha256(key.encode()).hexdigest()}.cubin"
        code = _read_kept(kept, key)
        if code is None:
            code, _ = _compile(code_of_file, self._file, options)
            _keep(kept, key, code)
        return code


_of_thread = threading.local()


def _postponed() -> dict[CudaKernel, tuple[int, int]] | None:
    """New kernels that this thread asked for inside `compiling_only`, with the last arguments of `load`."""
    return getattr(_of_thread, "postponed", None)


def is_compiling_only() -> bool:
    """Tells whether this thread is inside `compiling_only`: what it launches does not run."""
    return _postponed() is not None


@contextmanager
def compiling_only() -> Iterator[Mapping[CudaKernel, tuple[int, int]]]:
    """Nothing that this thread launches inside runs.

    New kernels that were asked for are the keys of what is returned; the values are for `load_all`.
    """
    postponed: dict[CudaKernel, tuple[int, int]] = {}
    _of_thread.postponed = postponed
    try:
        yield postponed
    finally:
        _of_thread.postponed = None


def load_all(kernels: Mapping[CudaKernel, tuple[int, int]], device: torch.device) -> None:
    """Compile kernels that were asked for, unless they are on disk, and load them, all at once."""
    if not kernels:
        return
    index = torch.cuda.current_device() if device.index is None else device.index
    with ThreadPoolExecutor(min(16, os.cpu_count() or 1)) as threads:
        list(threads.map(lambda item: item[0].load(index, *item[1]), kernels.items()))


def _as_word(argument: Argument) -> int:
    if type(argument) is int:
        return argument & 0xFFFFFFFF
    if isinstance(argument, Tensor):
        return argument.data_ptr()
    if isinstance(argument, TileMap):
        return 0  # stands elsewhere
    if isinstance(argument, float):
        return int.from_bytes(struct.pack("<f", argument), "little")
    return argument & 0xFFFFFFFF


class _EncodedMap(NamedTuple):
    """A driver's tensor map."""

    map: Any
    address: int
    """Of what a launch copies, as long as the map lives."""


def _encoded_map(given: TileMap) -> _EncodedMap:
    matrix = given.matrix
    return _encoded(matrix.data_ptr(), matrix.dtype, matrix.shape, matrix.stride(), given.box)


@lru_cache(1 << 12)
def _encoded(
    address: int, dtype: torch.dtype, shape: torch.Size, steps: tuple[int, ...], box: tuple[int, ...]
) -> _EncodedMap:
    """A map of elements of 16 bits; `steps`: strides in elements."""
    strides = [step * dtype.itemsize for step in steps[:-1]]
    if shape[0] == 1:  # there is no next one
        strides[0] = shape[-1] * dtype.itemsize
    assert dtype in (torch.bfloat16, torch.float16), dtype
    assert steps[-1] == 1, "columns must be neighbours"
    assert len(shape) == len(box), (shape, box)
    assert all(at % 16 == 0 for at in (address, *strides)), "rows begin at multiples of 16 bytes"
    driver = _driver()
    encoded = _check(
        driver.cuTensorMapEncodeTiled(
            driver.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
            len(shape),
            address,
            [driver.cuuint64_t(size) for size in reversed(shape)],
            [driver.cuuint64_t(stride) for stride in reversed(strides)],
            [driver.cuuint32_t(size) for size in reversed(box)],
            [driver.cuuint32_t(1)] * len(shape),
            driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
            driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
            driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
            driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        )
    )
    return _EncodedMap(encoded, int(encoded.getPtr()))


def _launch_config(
    grid: tuple[int, int, int], block: int, shared_bytes: int, cluster: int, dependent: bool, stream: int
) -> Any:
    driver = _driver()
    config = driver.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = grid
    config.blockDimX, config.blockDimY, config.blockDimZ = block, 1, 1
    config.sharedMemBytes, config.hStream = shared_bytes, stream
    attributes = []
    if cluster > 1:
        attribute = driver.CUlaunchAttribute()
        attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
        attribute.value.clusterDim.x, attribute.value.clusterDim.y = cluster, 1
        attribute.value.clusterDim.z = 1
        attributes.append(attribute)
    if dependent:
        attribute = driver.CUlaunchAttribute()
        attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        attribute.value.programmaticStreamSerializationAllowed = 1
        attributes.append(attribute)
    config.attrs, config.numAttrs = attributes, len(attributes)
    return config


def _read_kept(file: Path, key: str) -> bytes | None:
    """Returns the code kept for this key; None if none was, or something else is there."""
    try:
        content = file.read_bytes()
    except OSError:
        return None
    code, found = content[:-32], content[-32:]
    if code and found == _checksum(key, code):
        return code
    logger.warning("%s is damaged: the kernel is compiled again", file)
    return None


def _keep(file: Path, key: str, code: bytes) -> None:
    """Write it down; a folder that cannot be written to only costs time at the next start."""
    # Several processes may compile at once: a file appears with all its bytes or not at all.
    new = file.with_suffix(f".{os.getpid()}-{threading.get_ident()}")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        new.write_bytes(code + _checksum(key, code))
        os.replace(new, file)
    except OSError:
        with suppress(OSError):
            new.unlink()


def _checksum(key: str, code: bytes) -> bytes:
    return hashlib.sha256(key.encode() + b"\0" + code).digest()


def _options(capability: tuple[int, int], constants: dict[str, int]) -> list[str]:
    major, minor = capability
    macros = [f"-D{name}={int(value)}" for name, value in sorted(constants.items())]
    return [f"--gpu-architecture=sm_{major}{minor}a", "--std=c++17", *macros]


def _compile(source: str, name: str, options: Sequence[str]) -> tuple[bytes, str]:
    """(machine code, what the compiler said)."""
    from cuda.bindings import nvrtc

    headers = {name.encode(): text.encode() for name, text in _headers().items()}
    program = _check(
        nvrtc.nvrtcCreateProgram(
            source.encode(), name.encode(), len(headers), list(headers.values()), list(headers)
        )
    )
    (result,) = nvrtc.nvrtcCompileProgram(program, len(options), [option.encode() for option in options])
    log = bytearray(_check(nvrtc.nvrtcGetProgramLogSize(program)))
    _check(nvrtc.nvrtcGetProgramLog(program, log))
    said = log.decode(errors="replace").rstrip("\0\n")
    if int(result) != 0:
        raise CudaError(f"{name} does not compile with {' '.join(options)}:\n{said}")
    code = bytearray(_check(nvrtc.nvrtcGetCUBINSize(program)))
    _check(nvrtc.nvrtcGetCUBIN(program, code))
    _check(nvrtc.nvrtcDestroyProgram(program))
    return bytes(code), said


def _check(answer: tuple[Any, ...]) -> Any:
    """Returns the value of a call of the bindings, or raises for its status."""
    status, *values = answer
    if int(status) != 0:
        raise CudaError(f"{type(status).__name__}: {status.name}")
    return values[0] if values else None


@cache
def _driver() -> Any:
    from cuda.bindings import driver

    return driver


@cache
def _nvrtc_version() -> str:
    from cuda.bindings import nvrtc

    return str(nvrtc.nvrtcVersion()[1:])


def _headers() -> dict[str, str]:
    """Returns the text of all files that a source may include."""
    return {path.name: path.read_text() for path in sorted(_FOLDER.rglob("*.cuh"))}


def source(file: str) -> str:
    """Returns the text of a source: by its name, wherever it lies, or by an absolute path."""
    if Path(file).is_absolute():
        return Path(file).read_text()
    found = list(_FOLDER.rglob(file))
    if len(found) != 1:
        raise CudaError(f"{file}: {len(found)} sources of this name in {_FOLDER}, there must be one")
    return found[0].read_text()


def _with_includes(file: str) -> dict[str, str]:
    """Returns the texts of a source and of all files that it includes, by name."""
    texts: dict[str, str] = {}
    names = [file]
    while names:
        name = names.pop()
        if name not in texts:
            texts[name] = source(name)
            names += re.findall(r'^#include "(.+)"$', texts[name], re.MULTILINE)
    return texts


def _cache_folder() -> Path:
    import triton

    return Path(triton.knobs.cache.dir) / "ostinato"


def _main(file: str, *definitions: str) -> None:
    constants = {name: int(value) for name, value in (item.split("=") for item in definitions)}
    options = [*_options((9, 0), constants), "--ptxas-options=-v"]
    code, said = _compile(source(file), file, options)
    print(said)
    print(f"{len(code)} bytes")


if __name__ == "__main__":
    _main(*sys.argv[1:])
