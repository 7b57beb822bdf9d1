"""Attention over a paged KV cache: one contract (`backend`), a torch reference, Triton kernels."""

from .backend import AttentionBackend, get_backend
from .batch import PAGE_SIZE, AttentionBatch, HostLengths
from .errors import BackendError
from .heads import HeadPreparation

__all__ = [
    "PAGE_SIZE",
    "AttentionBackend",
    "AttentionBatch",
    "BackendError",
    "HeadPreparation",
    "HostLengths",
    "get_backend",
]
