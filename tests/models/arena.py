"""An allocator that places everything it is asked for in one tensor, and remembers what that was."""

import torch
from torch import Tensor

ALIGNMENT = 512
"""As torch places tensors on a GPU."""


class Arena:
    """Filled with something, so that nobody mistakes its memory for zeros."""

    def __init__(self, num_bytes: int, device: str = "cpu") -> None:
        self.memory = torch.full((num_bytes,), 0x3F, dtype=torch.uint8, device=device)
        self.asked: list[str] = []
        self.taken = 0

    def allocate(self, shape: tuple[int, ...], dtype: torch.dtype, name: str) -> Tensor:
        """The next piece."""
        size = dtype.itemsize * torch.Size(shape).numel()
        piece = self.memory[self.taken : self.taken + size]
        assert piece.numel() == size, "the arena is full"
        self.taken += -(-size // ALIGNMENT) * ALIGNMENT
        self.asked.append(name)
        return piece.view(dtype).view(shape)

    def holds(self, tensor: Tensor) -> bool:
        """Whether a tensor lies in it."""
        return tensor.untyped_storage().data_ptr() == self.memory.untyped_storage().data_ptr()
