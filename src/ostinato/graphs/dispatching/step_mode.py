"""The mode of a step decides which of several nested wrappers acts."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from ..errors import ConfigError
from .mode import GraphMode

_step_mode: ContextVar[GraphMode | None] = ContextVar("ostinato_step_mode", default=None)


@contextmanager
def step_mode(mode: GraphMode | str) -> Iterator[None]:
    """A context in which only wrappers with this mode act, of several nested ones."""
    mode = GraphMode.parse(mode)
    if not mode.is_runtime:
        raise ConfigError(f"the mode of a step must be NONE, PIECEWISE or FULL, not {mode.name}")
    token = _step_mode.set(mode)
    try:
        yield
    finally:
        _step_mode.reset(token)


decided_step_mode: Callable[[], GraphMode | None] = _step_mode.get
"""Returns the mode in effect; None if none was set, so that the outermost wrapper acts."""
