"""The engine's tiny model."""

from engine.conftest import one_thread, tiny

__all__ = ["one_thread", "tiny"]
