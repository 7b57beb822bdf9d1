"""Tensors of a saver with contents that can be recognised, and others that spoil released memory."""

import gc

import torch

from ostinato.memory import MemorySaver, Tag

MIB = 1 << 20


def filled(saver: MemorySaver, mib: int, tag: Tag, content: str, seed: int = 0) -> torch.Tensor:
    """So many MiB of known numbers."""
    block = saver.empty((mib * MIB // 4,), torch.int32, tag, content)
    return block.copy_(torch.arange(block.numel(), dtype=torch.int32, device=block.device) + seed)


def is_intact(block: torch.Tensor, seed: int = 0) -> bool:
    """Whether they are still there."""
    expected = torch.arange(block.numel(), dtype=torch.int32, device=block.device) + seed
    return torch.equal(block, expected)


def free_bytes(device: torch.device) -> int:
    """By cudaMemGetInfo, with nothing that torch keeps back."""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info(device)[0]


def leave_garbage(device: torch.device, nbytes: int) -> None:
    """Use memory for something else, and leave it full of that."""
    garbage = torch.empty(nbytes // 4, dtype=torch.int32, device=device).fill_(0x5A5A5A5A)
    del garbage
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
