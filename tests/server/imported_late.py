"""Clients that take seconds to import: loaded by the first test that uses them, not by every worker."""

import importlib.util
import sys
from types import ModuleType


def _late(name: str) -> ModuleType:
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.find_spec(name)
    assert spec is not None, f"pip install {name}"
    assert spec.loader is not None
    spec.loader = importlib.util.LazyLoader(spec.loader)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


aiohttp, openai = _late("aiohttp"), _late("openai")
