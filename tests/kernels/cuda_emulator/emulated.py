"""`CudaKernel` for tensors on a CPU.

A kernel's threads run in turns, from one wait for others to the next (`fibers.h`), and the instructions are
functions in C++ (`device.cuh`). What a GPU leaves to chance is at its worst: shared memory is full of NaN,
asynchronous copies arrive when they are waited for and no sooner. Speed, registers, a GPU's caches and what
kernels do to each other are not emulated.
"""

import atexit
import ctypes
import hashlib
import os
import platform
import re
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

import torch
from torch import Tensor

from ostinato.kernels.cuda import compiled
from ostinato.kernels.cuda.compiled import Argument, TileMap

COMPILER = shutil.which("g++")
MAY_SKIP = COMPILER is None and not os.environ.get("CI")
"""Where the environment promises a compiler, a missing one is a failure."""
SOURCES = Path(compiled.__file__).parents[1]
EMULATOR = Path(__file__).parent

_KINDS = {Tensor: "p", TileMap: "m", float: "f", int: "i"}
_OPTIONS = ("-O1", "-std=c++17", "-fPIC", "-fno-strict-aliasing", "-w")
_CONTRACTING = (
    "-ffp-contract=fast",
    "-fexpensive-optimizations",
    *(["-mfma"] if platform.machine() == "x86_64" else []),
)
_FILES = ("device.cuh", "warpgroup.cuh", "fibers.h", "launch.h")
MOST_SHARED_BYTES = 227 << 10
"""Of a program."""


class EmulatorError(RuntimeError):
    """The kernel did what a GPU does not allow."""


@dataclass(frozen=True)
class Emulator:
    """Makes kernels from a folder of sources and keeps them in another one."""

    builds: Path
    sources: Path = SOURCES
    contracts: bool = False
    """Products and sums become one operation wherever a source does not say how to round, as on a GPU."""

    def kernel(self, file: str, entry: str, **constants: int) -> "EmulatedKernel":
        """In the place of `compiled.cuda_kernel`."""
        return EmulatedKernel(self, file, entry, tuple(sorted(constants.items())))


@dataclass(frozen=True)
class EmulatedKernel:
    """In the place of a `CudaKernel`; compiled when it is first launched."""

    emulator: Emulator
    file: str
    entry: str
    constants: tuple[tuple[str, int], ...]

    def launch(
        self,
        *,
        grid: tuple[int, int, int],
        block: int,
        args: Sequence[Argument],
        shared_bytes: int = 0,
        cluster: int = 1,
        dependent: bool = True,
        shared_share: int = 100,
    ) -> None:
        """Run all of it."""
        tensors = [arg.matrix if isinstance(arg, TileMap) else arg for arg in args]
        extents = [extent for arg in tensors if isinstance(arg, Tensor) for extent in _extent(arg)]
        assert grid[0] % cluster == 0, (grid, cluster)
        assert block in range(32, 1025, 32), block
        assert shared_bytes <= MOST_SHARED_BYTES, shared_bytes
        kinds = "".join(next(kind for of, kind in _KINDS.items() if isinstance(arg, of)) for arg in args)
        assert kinds == self._library.parameter_kinds().decode(), "not the parameters of the source"
        maps = {i: _tensor_map(arg) for i, arg in enumerate(args) if isinstance(arg, TileMap)}
        words = [ctypes.addressof(maps[i]) if i in maps else compiled._as_word(a) for i, a in enumerate(args)]
        values = (ctypes.c_uint64 * len(args))(*words)
        failure = self._library.launch(
            *grid,
            block,
            ctypes.c_size_t(shared_bytes),
            cluster,
            values,
            (ctypes.c_uint64 * len(extents))(*extents),
            ctypes.c_size_t(len(extents) // 2),
        )
        if failure:
            raise EmulatorError(failure.decode())

    @cached_property
    def _library(self) -> ctypes.CDLL:
        library = ctypes.CDLL(str(self._build()))
        for function in (library.parameter_kinds, library.launch):
            function.restype = ctypes.c_char_p
        return library

    def _build(self) -> Path:
        """The compiled kernel; from the folder if it was compiled before."""
        assert COMPILER is not None
        macros = [f"-D{name}={int(value)}" for name, value in self.constants]
        files = {path.name: path.read_text() for path in sorted(self.emulator.sources.rglob("*.cu*"))}
        files |= {name: (EMULATOR / name).read_text() for name in _FILES}
        files["kernel.cpp"] = f'#include "{self.file}"\n#include "launch.h"\n'
        contracting = _CONTRACTING if self.emulator.contracts else ()
        command = [COMPILER, *_OPTIONS, *contracting, "-shared", f"-DENTRY={self.entry}", *macros]
        key = hashlib.sha256("\n".join([*command, *files.values()]).encode()).hexdigest()
        kept = self.emulator.builds / f"{key}.so"
        if kept.exists():
            return kept
        # In one folder, because a file that another one includes is looked for beside that first.
        with tempfile.TemporaryDirectory(dir=self.emulator.builds) as folder:
            for name, text in files.items():
                Path(folder, name).write_text(text)
            built = Path(folder, "kernel.so")
            command += [
                "-include",
                _standard_headers(contracting),
                "-o",
                str(built),
                str(Path(folder, "kernel.cpp")),
            ]
            said = subprocess.run(command, capture_output=True, text=True)
            if said.returncode != 0:
                raise EmulatorError(f"{self.file} does not compile with {' '.join(macros)}:\n{said.stderr}")
            os.replace(built, kept)
        return kept


@cache
def _standard_headers(options: tuple[str, ...]) -> str:
    """A file that includes those of the standard library, read by the compiler once for all kernels."""
    assert COMPILER is not None
    names = {
        name for file in _FILES for name in re.findall(r"#include (<.+>)", (EMULATOR / file).read_text())
    }
    folder = tempfile.mkdtemp()
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    file = Path(folder, "standard.h")
    file.write_text("".join(f"#include {name}\n" for name in sorted(names)))
    subprocess.run([COMPILER, *_OPTIONS, *options, "-x", "c++-header", str(file)], check=True)
    return str(file)


def _tensor_map(given: TileMap) -> ctypes.Array[ctypes.c_int64]:
    """As `warpgroup.cuh` here has it: what a driver would refuse is refused here, too."""
    tensor = given.matrix
    assert tensor.dtype in (torch.bfloat16, torch.float16)
    assert tensor.stride(-1) == 1, "columns must be neighbours"
    assert tensor.dim() == len(given.box) <= 4
    strides = [stride * tensor.element_size() for stride in tensor.stride()[::-1]]
    assert tensor.data_ptr() % 16 == 0 == sum(stride % 16 for stride in strides[1:]), "not aligned"
    assert all(size in range(1, 257) for size in given.box), given
    missing = 4 - tensor.dim()
    sizes, box = tensor.shape[::-1], given.box[::-1]
    values = [(*sizes, *[1] * missing), (*strides, *[0] * missing), (*box, *[1] * missing)]
    return (ctypes.c_int64 * 14)(tensor.data_ptr(), tensor.dim(), *(v for of in values for v in of))


def _extent(tensor: Tensor) -> tuple[int, int]:
    """Addresses of the first byte of its storage, on a CPU, and of that behind the last."""
    assert tensor.device.type == "cpu"
    storage = tensor.untyped_storage()
    return storage.data_ptr(), storage.data_ptr() + storage.nbytes()
