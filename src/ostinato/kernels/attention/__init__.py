"""Attention over a paged KV cache: one contract (`backend`), a torch reference, Triton kernels."""

from .backend import AttentionBackend, BackendError, get_backend
from .batch import PAGE_SIZE, AttentionBatch, HostLengths

__all__ = ["PAGE_SIZE", "AttentionBackend", "AttentionBatch", "BackendError", "HostLengths", "get_backend"]
