"""The contract of an attention backend, and the backends there are."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from . import torch_reference
from .batch import AttentionBatch, HeadPreparation, HostLengths
from .choice import BackendError


class Attend(Protocol):
    """Attention of q [T, Hq, D] over the cache, causal within each request: [T, Hq, D]."""

    def __call__(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        batch: AttentionBatch,
        *,
        scale: float,
        sliding_window: int | None = None,
    ) -> Tensor:
        """A token at position p sees positions max(0, p - sliding_window + 1) to p."""
        ...


class AttendEager(Protocol):
    """The same outside a graph, where real lengths may be known."""

    def __call__(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        batch: AttentionBatch,
        *,
        scale: float,
        sliding_window: int | None = None,
        lengths: HostLengths | None = None,
    ) -> Tensor:
        """As `Attend`; `lengths` only saves time."""
        ...


class AttendQkv(Protocol):
    """The same from the QKV projection: [T, (Hq + 2 Hkv) * D] to [T, Hq, D]."""

    def __call__(
        self,
        qkv: Tensor,
        heads: HeadPreparation,
        k_cache: Tensor,
        v_cache: Tensor,
        batch: AttentionBatch,
        *,
        num_heads: int,
        scale: float,
        sliding_window: int | None = None,
    ) -> Tensor:
        """Normalises and rotates queries and keys, stores the step's KV, and attends."""
        ...


class StoreQkv(Protocol):
    """The part of `AttendQkv` that later tokens need."""

    def __call__(
        self,
        qkv: Tensor,
        heads: HeadPreparation,
        k_cache: Tensor,
        v_cache: Tensor,
        batch: AttentionBatch,
        *,
        num_heads: int,
    ) -> None:
        """Normalises and rotates keys, and stores the step's KV."""
        ...


class MostPlaces(Protocol):
    """For so many tokens of one request in `equal_places` `attend_qkv` has a way of its own."""

    def __call__(
        self, num_heads: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device
    ) -> int:
        """Of layers like these; 0: for none."""
        ...


@dataclass(frozen=True)
class AttentionBackend:
    """How a step writes its KV and attends.

    Neither backend needs host-side preparation before a capture or a replay: whatever varies is in the
    device tensors of the batch.
    """

    name: str
    """What `get_backend` calls it."""

    capability: str
    """Name of the runtime's `Capability`: which batches `attend` can be captured for."""

    write_kv: Callable[[Tensor, Tensor, Tensor, Tensor, AttentionBatch], None]
    """`write_kv(k, v, k_cache, v_cache, batch)`: store the step's KV. Can be captured."""

    attend: Attend
    """Reads only static buffers; every shape and grid follows from the rung. Can be captured."""

    attend_eager: AttendEager
    """For eager steps and between captured segments."""

    attend_qkv: AttendQkv | None = None
    """All of it in fewer kernels, in a graph or out of it; None: there is nothing to gain."""

    store_qkv: StoreQkv | None = None
    """Where there is `attend_qkv`."""

    most_places: MostPlaces | None = None
    """Where it pays to say of a step that `equal_places` are its; None: nowhere."""

    keep_beside: Callable[[Tensor], object] | None = None
    """`keep_beside(k_cache)`: make what kernels keep beside a layer's keys, which no capture can; None:
    nothing."""

    reads_prefix_once: bool = False
    """Whether `attend_qkv`, or `attend` where there is none, makes use of `AttentionBatch.prefix_lens`."""


# `attend_captured` is legal for every batch, so ALWAYS is what is true. It is efficient for single tokens
# only: on a CPU, prompts are faster with PIECEWISE, where `attend_eager` serves them.
TORCH = AttentionBackend(
    name="torch",
    capability="ALWAYS",
    write_kv=torch_reference.write_kv,
    attend=torch_reference.attend_captured,
    attend_eager=torch_reference.attend_eager,
    reads_prefix_once=True,
)


def get_backend(name: str, device: torch.device | str) -> AttentionBackend:
    """Returns the backend `torch`, `triton`, or `auto`: triton on NVIDIA GPUs and torch elsewhere."""
    device = torch.device(device)
    if name == "auto":
        name = "triton" if device.type == "cuda" else "torch"
    if name == "torch":
        return TORCH
    if name == "triton":
        return _triton(device)
    raise BackendError(f"unknown attention backend {name!r}: use one of auto, torch, triton")


def _triton(device: torch.device) -> AttentionBackend:
    try:
        from . import gpu_ops
    except ImportError as error:
        raise BackendError(
            "the triton attention backend needs the package triton (pip install triton), or use torch"
        ) from error
    if device.type != "cuda" and not gpu_ops.INTERPRETED:
        raise BackendError(
            f"the triton attention backend needs a CUDA device, not {device}: use torch, or set "
            "TRITON_INTERPRET=1 before Python starts to run its kernels slowly anywhere"
        )
    return AttentionBackend(
        name="triton",
        capability="ALWAYS",
        write_kv=torch_reference.write_kv,
        attend=gpu_ops.attend,
        attend_eager=gpu_ops.attend_eager,
        attend_qkv=gpu_ops.attend_qkv,
        store_qkv=gpu_ops.store_qkv,
        most_places=gpu_ops.most_places,
        keep_beside=gpu_ops.keep_beside,
        reads_prefix_once=True,
    )
