"""Device memory that can be released and restored at the same addresses: `MemorySaver`. Needs only torch; on
a GPU also `cuda.bindings` and a C compiler."""

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
