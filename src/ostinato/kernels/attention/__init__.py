"""Attention over a paged KV cache: one contract (`backend`), a torch reference, Triton kernels."""

from .backend import AttentionBackend, get_backend
from .batch import PAGE_SIZE, AttentionBatch, HeadPreparation, HostLengths
from .choice import BackendError

__all__ = [
    "PAGE_SIZE",
    "AttentionBackend",
    "AttentionBatch",
    "BackendError",
    "HeadPreparation",
    "HostLengths",
    "get_backend",
]
