"""Memory that can be given back and taken again at the same addresses: `MemorySaver`. Needs only torch, and
on a GPU `cuda.bindings` and a C compiler."""

from .blocks import TAGS, Content, Tag
from .errors import SaverError, SaverMemoryError
from .graph_memory import GraphMemory
from .reports import Held, Paused, Resumed
from .saver import MemorySaver

__all__ = [
    "TAGS",
    "Content",
    "GraphMemory",
    "Held",
    "MemorySaver",
    "Paused",
    "Resumed",
    "SaverError",
    "SaverMemoryError",
    "Tag",
]
