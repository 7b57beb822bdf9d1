"""`CudaKernel` for tensors on a CPU.

A kernel's threads run in turns, from one wait for others to the next (`fibers.h`), and the instructions are
functions in C++ (`device.cuh`). What a GPU leaves to chance is at its worst: shared memory is full of NaN,
asynchronous copies arrive when they are waited for and no sooner. Speed, registers, a GPU's caches and what
kernels do to each other are not emulated.
"""

import ctypes
import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from torch import Tensor

from ostinato.kernels.cuda import compiled
from ostinato.kernels.cuda.compiled import Argument

COMPILER = shutil.which("g++")
MAY_SKIP = COMPILER is None and not os.environ.get("CI")
"""Where the environment promises a compiler, a missing one is a failure."""
SOURCES = Path(compiled.__file__).parent
EMULATOR = Path(__file__).parent

_OPTIONS = ("-O1", "-std=c++17", "-shared", "-fPIC", "-fno-strict-aliasing", "-w")
MOST_SHARED_BYTES = 227 << 10
"""Of a program."""


class EmulatorError(RuntimeError):
    """The kernel did what a GPU does not allow."""


@dataclass(frozen=True)
class Emulator:
    """Makes kernels from a folder of sources and keeps them in another one."""

    builds: Path
    sources: Path = SOURCES

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
        assert all(arg.device.type == "cpu" for arg in args if isinstance(arg, Tensor))
        assert grid[0] % cluster == 0, (grid, cluster)
        assert block in range(32, 1025, 32), block
        assert shared_bytes <= MOST_SHARED_BYTES, shared_bytes
        kinds = "".join("p" if isinstance(a, Tensor) else "f" if isinstance(a, float) else "i" for a in args)
        assert kinds == self._library.parameter_kinds().decode(), "not the parameters of the source"
        values = (ctypes.c_uint64 * len(args))(*map(compiled._as_word, args))
        tensors = [extent for arg in args if isinstance(arg, Tensor) for extent in _extent(arg)]
        failure = self._library.launch(
            *grid,
            block,
            ctypes.c_size_t(shared_bytes),
            cluster,
            values,
            (ctypes.c_uint64 * len(tensors))(*tensors),
            ctypes.c_size_t(len(tensors) // 2),
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
        files = {path.name: path.read_text() for path in sorted(self.emulator.sources.glob("*.cu*"))}
        files |= {name: (EMULATOR / name).read_text() for name in ("device.cuh", "fibers.h", "launch.h")}
        files["kernel.cpp"] = f'#include "{self.file}"\n#include "launch.h"\n'
        command = [COMPILER, *_OPTIONS, f"-DENTRY={self.entry}", *macros]
        key = hashlib.sha256("\n".join([*command, *files.values()]).encode()).hexdigest()
        kept = self.emulator.builds / f"{key}.so"
        if kept.exists():
            return kept
        # In one folder, because a file that another one includes is looked for beside that first.
        with tempfile.TemporaryDirectory(dir=self.emulator.builds) as folder:
            for name, text in files.items():
                Path(folder, name).write_text(text)
            built = Path(folder, "kernel.so")
            said = subprocess.run(
                [*command, "-o", str(built), str(Path(folder, "kernel.cpp"))], capture_output=True, text=True
            )
            if said.returncode != 0:
                raise EmulatorError(f"{self.file} does not compile with {' '.join(macros)}:\n{said.stderr}")
            os.replace(built, kept)
        return kept


def _extent(tensor: Tensor) -> tuple[int, int]:
    """Addresses of the first byte of its storage and of that behind the last."""
    storage = tensor.untyped_storage()
    return storage.data_ptr(), storage.data_ptr() + storage.nbytes()
