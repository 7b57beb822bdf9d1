"""What happens to queries and keys between their projection and attention."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class HeadPreparation:
    """Norm and rotation of one layer's heads."""

    rotary: Tensor
    """float32 [positions, D]: cos of the D/2 angles of each position, then their sin."""

    q_norm: Tensor | None = None
    """[D]: weight of the norm of each query head; None: no norm, neither of queries nor of keys."""

    k_norm: Tensor | None = None
    """[D]: of each key head."""

    eps: float = 1e-6
    """Of both norms."""
