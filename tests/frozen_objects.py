"""How many objects are frozen, without counting them again each time somebody asks.

`gc.get_freeze_count()` walks all of them: 30 ms with torch and transformers loaded, and every capture asks
whether somebody has frozen what it would freeze. Only `gc.freeze()` and `gc.unfreeze()` change the answer.
"""

import gc
from collections.abc import Callable


class FrozenObjects:
    """Stands before the three functions of `gc`."""

    def __init__(self) -> None:
        self._freeze, self._unfreeze, self._count = gc.freeze, gc.unfreeze, gc.get_freeze_count
        self._known: int | None = None

    def count_once(self) -> None:
        """From now on."""
        gc.freeze, gc.unfreeze = self._changing(self._freeze), self._changing(self._unfreeze)
        gc.get_freeze_count = self._counted

    def _changing(self, function: Callable[[], None]) -> Callable[[], None]:
        def call() -> None:
            function()
            self._known = None

        return call

    def _counted(self) -> int:
        if self._known is None:
            self._known = self._count()
        return self._known
