"""A mode that sees every ATen call, without the seconds that the first one costs in torch's own.

torch keeps `torch._dynamo` away from what a mode does, and imports it for that at the first call, also where
nothing is ever compiled. As long as nobody has imported it there is nothing to keep away.
"""

import sys
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode


class DispatchMode(TorchDispatchMode):
    """Like `TorchDispatchMode`, but does not import `torch._dynamo`."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        guarded = cls.__dict__.get("__torch_dispatch__")
        plain = getattr(guarded, "__wrapped__", None)
        if guarded is None or plain is None:  # this torch guards nothing
            return

        def __torch_dispatch__(self: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            # While it is being imported, it has nothing to disable yet.
            ready = hasattr(sys.modules.get("torch._dynamo"), "disable")
            return (guarded if ready else plain)(self, func, types, args, kwargs)

        cls.__torch_dispatch__ = __torch_dispatch__  # type: ignore[method-assign]
