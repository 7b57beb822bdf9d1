"""`import ostinato.compat.vllm`: after this, `import vllm` finds Ostinato.

For trainers that import vLLM by name, such as TRL's: import this module before them. `vllm` and the module
paths in `engine/vllm_api/module_paths.py` then belong to Ostinato, and `importlib.metadata` finds a
distribution `vllm` with the version whose interface is provided. Importing anything else from it raises an
error that says so. An installed vLLM is not hidden unless OSTINATO_HIDES_VLLM=1 is set in the environment.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import sys
from collections.abc import Iterable, Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import ostinato
from ostinato.engine.vllm_api.module_paths import PATHS, PathFinder

INTERFACE = "0.28.0"
"""The version of vLLM whose names and calls are provided."""
VERSION = f"{INTERFACE}+ostinato"
_HIDES = "OSTINATO_HIDES_VLLM"
_TOO_LATE = ("trl.generation.vllm_client", "trl.generation.vllm_generation")
"""Modules that look for vLLM once, when they are imported."""


class _Distribution(importlib.metadata.Distribution):
    """The distribution that `importlib.metadata` sees."""

    def read_text(self, filename: str) -> str | None:
        texts = {
            "METADATA": f"Metadata-Version: 2.1\nName: vllm\nVersion: {VERSION}\n"
            "Summary: Ostinato in vLLM's place\n",
            "top_level.txt": "vllm\n",
        }
        return texts.get(filename)

    def locate_file(self, path: str | os.PathLike[str]) -> Path:  # type: ignore[override]
        return Path(__file__).parent / path


class _Finder(PathFinder):
    """Finds `vllm` and the modules inside that exist here, and raises for others."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """All modules are packages, so that missing names imported from them are looked up here."""
        top, _, inside = name.partition(".")
        if top != "vllm":
            return None
        if not inside or inside in PATHS or any(path.startswith(f"{inside}.") for path in PATHS):
            return ModuleSpec(name, self, origin=__file__, is_package=True)
        # Without `name=`: the import system would take that for a mere absence, and leave our words out.
        raise ModuleNotFoundError(
            f"No module or name {name!r}: Ostinato replaces vLLM here (ostinato.compat.vllm) and does not "
            "provide it; docs/trl.md lists what it provides"
        )

    def exec_module(self, module: ModuleType) -> None:
        if module.__name__ == "vllm":
            self._fill(module)
        else:
            super().exec_module(module)
        module.__file__ = __file__  # so that the error of a missing name says whose module it is

    def _fill(self, module: ModuleType) -> None:
        """Give the top-level module `vllm` the names of `ostinato`."""
        names = [
            name for name in ostinato.__all__ if name not in ostinato.graphs.__all__ and name != "graphs"
        ]

        def get(name: str) -> Any:
            if name not in names:
                raise AttributeError(
                    f"module 'vllm' has no attribute {name!r}: Ostinato replaces it here "
                    "(ostinato.compat.vllm)"
                )
            return self.lookup("engine.llm", name) if name == "LLM" else getattr(ostinato, name)

        module.__doc__ = __doc__
        module.__dict__.update(__version__=VERSION, __getattr__=get, __all__=names, __dir__=lambda: names)

    def lookup(self, home: str, name: str) -> Any:
        is_llm = (home, name) == ("engine.llm", "LLM")
        return super().lookup("compat.strict_llm" if is_llm else home, name)

    def find_distributions(
        self, context: importlib.metadata.DistributionFinder.Context
    ) -> Iterable[importlib.metadata.Distribution]:
        """For `importlib.metadata`, which asks every finder on `sys.meta_path`."""
        return [_Distribution()] if context.name in (None, "vllm") else []


def _install() -> None:
    if any(getattr(finder, "package", None) == "vllm" for finder in sys.meta_path):
        return  # this module was loaded again
    late = [name for name in ("vllm", *_TOO_LATE) if name in sys.modules]
    if late:
        raise ImportError(f"{late[0]} was already imported: import ostinato.compat.vllm before it")
    if os.environ.get(_HIDES) != "1" and (real := importlib.util.find_spec("vllm")) is not None:
        raise ImportError(
            f"vLLM is installed ({real.origin}), and ostinato.compat.vllm would hide it: set {_HIDES}=1 to "
            "allow that"
        )
    sys.meta_path.insert(0, _Finder("vllm", "ostinato"))
    importlib.invalidate_caches()
    importlib.import_module("vllm")


_install()
