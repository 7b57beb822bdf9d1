"""A mode that sees every ATen call, without the seconds that the first one costs in torch's own.

torch keeps `torch._dynamo` away from what a mode does, and imports it for that at the first call, also where
nothing is ever compiled. While it looks at no frames of this thread there is nothing to keep away, and asking
for that is cheaper than sending it away at every call of a recording.
"""

from typing import Any

from torch._C._dynamo.eval_frame import get_eval_frame_callback
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
            looks = get_eval_frame_callback() is not None
            return (guarded if looks else plain)(self, func, types, args, kwargs)

        cls.__torch_dispatch__ = __torch_dispatch__  # type: ignore[method-assign]
