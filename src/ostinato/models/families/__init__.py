"""The supported model families, one file each: what their layers are like, and how files name their tensors.

To add one: add a file with a `Family` here, and its name to this list.
"""

from .family import Family
from .llama import LLAMA
from .mistral import MISTRAL
from .qwen2 import QWEN2
from .qwen3 import QWEN3

FAMILIES: tuple[Family, ...] = (LLAMA, MISTRAL, QWEN2, QWEN3)

BY_ARCHITECTURE: dict[str, Family] = {
    family.architectures[kind]: family for kind in (0, 1, 2) for family in FAMILIES
}
"""By the values of `architectures` in a `config.json` that the engine runs (`...Model` only embeds,
`...ForSequenceClassification` also classifies)."""
