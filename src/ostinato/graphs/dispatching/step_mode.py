"""Which of several nested wrappers acts: the mode of the step decides."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from ..errors import ConfigError
from .mode import GraphMode

_step_mode: ContextVar[GraphMode | None] = ContextVar("ostinato_step_mode", default=None)


@contextmanager
def step_mode(mode: GraphMode | str) -> Iterator[None]:
    """Decide which of several nested wrappers acts in this context: those of this mode, and no others."""
    mode = GraphMode.parse(mode)
    if not mode.is_runtime:
        raise ConfigError(f"a step runs as NONE, PIECEWISE or FULL, not as {mode.name}")
    token = _step_mode.set(mode)
    try:
        yield
    finally:
        _step_mode.reset(token)


def decided_step_mode() -> GraphMode | None:
    """The mode in force; None where nobody has decided, so that the outermost wrapper does."""
    return _step_mode.get()
