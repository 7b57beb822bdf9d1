"""How layers of one model, or of two families, may differ."""

from dataclasses import dataclass


@dataclass(frozen=True)
class LayerKind:
    """One layer, besides its sizes, which all layers of a model share."""

    window: int | None = None
    """How many positions a token sees, itself included; None is all of them."""
    qkv_bias: bool = False
    output_bias: bool = False
    """Whether the projection after attention has a bias."""
    mlp_bias: bool = False
    qk_norm: bool = False
    """Whether each query and key head is normalised before its rotation."""
