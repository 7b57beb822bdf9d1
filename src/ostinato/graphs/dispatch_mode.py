"""A mode that sees every ATen call, without the seconds that the first one costs in torch's own.

torch keeps `torch._dynamo` away from what a mode does, and imports it for that at the first call, also where
nothing is ever compiled. Here the frames of a mode are marked for it as none of its business, which needs no
import.
"""

import sys
from contextlib import ExitStack
from types import FrameType
from typing import Any

import torch
from torch._C._dynamo import eval_frame
from torch._ops import HigherOrderOperator
from torch.utils._python_dispatch import TorchDispatchMode

from .blame import calling_line

_MADE_OF_OPS = ("flex_attention", "flex_attention_backward")
"""Operators over functions that, uncompiled, are a fixed sequence of ATen calls."""
_COMPILE_THEMSELVES = ("torch._higher_order_ops.", "torch.nn.attention.flex_attention")
_SKIPPED = eval_frame._FrameExecStrategy(eval_frame._FrameAction.SKIP, eval_frame._FrameAction.SKIP)


class DispatchMode(TorchDispatchMode):
    """Like `TorchDispatchMode`, but does not import `torch._dynamo`, and knows operators over functions."""

    supports_higher_order_operators = True

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        guarded = cls.__dict__.get("__torch_dispatch__")
        if guarded is None:
            return
        plain = getattr(guarded, "__wrapped__", guarded)

        def __torch_dispatch__(self: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if isinstance(func, HigherOrderOperator):
                return self._run_higher_order(func, args, kwargs or {})
            return plain(self, func, types, args, kwargs)

        eval_frame.set_code_exec_strategy(__torch_dispatch__.__code__, _SKIPPED)
        cls.__torch_dispatch__ = __torch_dispatch__  # type: ignore[method-assign]

    def _run_higher_order(self, operator: HigherOrderOperator, args: Any, kwargs: Any) -> Any:
        try:
            if operator.name() in _MADE_OF_OPS:
                plain = operator.py_kernels[torch._C.DispatchKey.CompositeExplicitAutograd]
                with self:
                    return plain(*args, **kwargs)
            self.pass_unseen(
                f"torch's operator {operator.name()!r} decides by values, on the host, what runs: keep the "
                f"decision in tensors (torch.where), or make it outside of the step (at {calling_line()})"
            )
            return operator(*args, **kwargs)
        finally:
            _forget_what_was_skipped()

    def pass_unseen(self, why_not_captured: str) -> None:
        """An operator over functions is about to run whose calls this mode will not see (`cond`)."""


def _forget_what_was_skipped() -> None:
    """Operators over functions compile themselves, which `torch._dynamo` skips under a mode, and would skip
    for ever: their next call would fail."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_globals.get("__name__", "").startswith(_COMPILE_THEMSELVES):
            eval_frame.reset_code(frame.f_code)
        frame = frame.f_back


class WatchingMode(DispatchMode):
    """One that must see what a step does: compiled code runs as it was written meanwhile.

    Of its own accord, torch would run what is compiled uncompiled under any mode, and from then on for ever.
    """

    def __enter__(self) -> Any:
        self._stances = [*getattr(self, "_stances", ()), ExitStack()]
        # Whoever compiles has loaded the one; the other compiles itself.
        loads = "torch._dynamo" in sys.modules or "torch.nn.attention.flex_attention" in sys.modules
        if loads and not eval_frame.get_eval_frame_callback():
            self._stances[-1].enter_context(torch.compiler.set_stance("force_eager"))
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        try:
            super().__exit__(*error)
        finally:
            self._stances.pop().close()
