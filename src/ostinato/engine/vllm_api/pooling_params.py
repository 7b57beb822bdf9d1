"""How a request's prompt is turned into a vector or scores; the fields have vLLM's names."""

from __future__ import annotations

from dataclasses import dataclass

from ..parameters.sampling_params import RequestError


@dataclass(kw_only=True)
class PoolingParams:
    """Parameters of `embed`, `encode`, `classify` and `score`."""

    dimensions: int | None = None
    """Keep only the first numbers of an embedding, this many (for models trained that way); None: all."""
    normalize: bool | None = None
    """Scale an embedding to length 1, which is the default."""
    use_activation: bool | None = None
    """For scores: probabilities (the default) instead of logits; for embeddings: the same as `normalize`."""
    task: str | None = None
    """embed, classify or score; the called method determines it too."""

    def __post_init__(self) -> None:
        wrong = self.dimensions is not None and (
            not isinstance(self.dimensions, int) or isinstance(self.dimensions, bool) or self.dimensions < 1
        )
        if wrong:
            raise RequestError(f"dimensions must be an integer of at least 1, not {self.dimensions!r}")

    @property
    def activates(self) -> bool:
        """Whether scores are turned into probabilities."""
        return self.use_activation is not False

    @property
    def normalizes(self) -> bool:
        """Whether embeddings are scaled to length 1."""
        chosen = self.normalize if self.normalize is not None else self.use_activation
        return chosen is not False
