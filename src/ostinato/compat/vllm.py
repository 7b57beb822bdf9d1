"""`import ostinato.compat.vllm`: from here on `import vllm` finds Ostinato.

For trainers that import vLLM by name, TRL's above all: import this before them. `vllm` and the module paths
of `engine/vllm_api/module_paths.py` are then Ostinato's, and `importlib.metadata` knows a distribution `vllm`
of the version whose interface this is. What is not covered cannot be imported, and the error says so. A vLLM
that is installed is not hidden unless OSTINATO_HIDES_VLLM=1 is in the environment.
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
"""The version of vLLM whose names and calls these are."""
VERSION = f"{INTERFACE}+ostinato"
_HIDES = "OSTINATO_HIDES_VLLM"
_TOO_LATE = ("trl.generation.vllm_client", "trl.generation.vllm_generation")
"""Modules that have looked for vLLM when they were imported, and do not look again."""


class _Distribution(importlib.metadata.Distribution):
    """What `importlib.metadata` is told."""

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
    """Finds `vllm` and what is inside, and tells what is not."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """All are packages, so that whatever is imported from one and missing is asked for here."""
        top, _, inside = name.partition(".")
        if top != "vllm":
            return None
        if not inside or inside in PATHS or any(path.startswith(f"{inside}.") for path in PATHS):
            return ModuleSpec(name, self, origin=__file__, is_package=True)
        # Without `name=`: the import system would take that for a mere absence, and leave our words out.
        raise ModuleNotFoundError(
            f"No module or name {name!r}: Ostinato stands in vLLM's place here (ostinato.compat.vllm) and "
            "does not cover it; docs/trl.md lists what it does"
        )

    def exec_module(self, module: ModuleType) -> None:
        if module.__name__ == "vllm":
            self._fill(module)
        else:
            super().exec_module(module)
        module.__file__ = __file__  # so that the error of a missing name says whose module it is

    def _fill(self, module: ModuleType) -> None:
        """The names that vLLM has at its top are those that `ostinato` has there."""
        names = [
            name for name in ostinato.__all__ if name not in ostinato.graphs.__all__ and name != "graphs"
        ]

        def get(name: str) -> Any:
            if name not in names:
                raise AttributeError(
                    f"module 'vllm' has no attribute {name!r}: Ostinato stands in its place "
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
        """For `importlib.metadata`, which asks everybody on `sys.meta_path`."""
        return [_Distribution()] if context.name in (None, "vllm") else []


def _install() -> None:
    if any(getattr(finder, "package", None) == "vllm" for finder in sys.meta_path):
        return  # this module was loaded again
    late = [name for name in ("vllm", *_TOO_LATE) if name in sys.modules]
    if late:
        raise ImportError(f"import ostinato.compat.vllm before {late[0]}: that was imported already")
    if os.environ.get(_HIDES) != "1" and (real := importlib.util.find_spec("vllm")) is not None:
        raise ImportError(
            f"vLLM is installed ({real.origin}), and ostinato.compat.vllm would hide it: set {_HIDES}=1 if "
            "that is what you want"
        )
    sys.meta_path.insert(0, _Finder("vllm", "ostinato"))
    importlib.invalidate_caches()
    importlib.import_module("vllm")


_install()
