"""Clients that take seconds to import: loaded by the first test that uses them, not by every worker."""

import importlib
from typing import Any


class _Late:
    """Imported when something of it is asked for. Names that begin with an underscore do not count: pytest
    asks for some of whatever a test file has."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(importlib.import_module(self._name), name)


aiohttp: Any = _Late("aiohttp")
openai: Any = _Late("openai")
requests: Any = _Late("requests")
