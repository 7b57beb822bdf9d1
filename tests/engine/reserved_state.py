"""What the engine holds per request row and per KV page, found by its size rather than by name.

With a number of rows and of pages that no other dimension has, a first dimension tells what a tensor is;
so the checks of row 0 and page 0 cover whatever state there is, also what is added later.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from ostinato.engine.llm import LLM


def tensors_with(llm: LLM, first_dimension: int) -> dict[str, torch.Tensor]:
    """Every tensor and array of the engine, outside weights and graphs, of this first dimension."""
    seen: set[int] = set()
    found = {}
    for name, tensor in _walk(llm.engine.core, "core", seen):
        if tensor.ndim and tensor.size(0) == first_dimension:
            found[name] = tensor
    return found


def _walk(node: Any, name: str, seen: set[int]) -> Iterator[tuple[str, torch.Tensor]]:
    if id(node) in seen:
        return
    seen.add(id(node))
    if isinstance(node, torch.Tensor):
        yield name, node
    elif isinstance(node, np.ndarray):
        if node.dtype != object:
            yield name, torch.from_numpy(node)
    elif isinstance(node, dict):
        for key, value in node.items():
            yield from _walk(value, f"{name}[{key}]", seen)
    elif isinstance(node, list | tuple):
        for at, value in enumerate(node):
            yield from _walk(value, f"{name}[{at}]", seen)
    elif _is_ours(node):
        for key, value in vars(node).items():
            yield from _walk(value, f"{name}.{key}", seen)


def _is_ours(node: Any) -> bool:
    module = type(node).__module__
    is_ours = module.startswith("ostinato.") and not module.startswith("ostinato.graphs")
    return is_ours and not isinstance(node, torch.nn.Module) and hasattr(node, "__dict__")
