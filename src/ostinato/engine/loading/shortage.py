"""Messages for an engine that does not fit: what it needs and has, by cause, and which option to change."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from ostinato.kernels.constants import PAGE_SIZE

from ..resolved_config import ResolvedConfig
from .device_memory import OUTSIDE_GRAPHS, MemoryPlan

_MOST = 0.98
"""The largest fraction of a GPU worth trying: the driver needs the rest."""


@dataclass(frozen=True)
class Room:
    """A device's memory, in bytes."""

    total: int
    free: int

    @classmethod
    def on(cls, device: torch.device) -> Room:
        """The present state, not counting what torch caches."""
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(device)
        return cls(total, free)

    def allowed(self, fraction: float) -> int:
        """How many free bytes may be used if this fraction of the whole device may."""
        return int(self.total * fraction) - (self.total - self.free)


def no_room_for_weights(config: ResolvedConfig, weights: int, room: Room) -> str:
    """Called before anything is allocated."""
    others = room.total - room.free
    return (
        f"weights take {_gib(weights)} in {config.dtype}, and {_free(config, room)} "
        f"({_gib(others)} are in use): free memory there, or use a smaller model or dtype"
    )


def no_room_for_kv(
    config: ResolvedConfig, plan: MemoryPlan, weights: int, page_bytes: int, room: Room
) -> str:
    """Not even two pages fit; `room`: with the weights in place."""
    asked = config.config
    needed = (config.page_columns + 1) * page_bytes
    left = room.allowed(asked.mem_fraction) - plan.to_come
    taken = room.total - room.free
    return (
        f"no memory is left for the KV cache on {config.device}: mem_fraction={asked.mem_fraction:g} of "
        f"{_gib(room.total)} is {_gib(room.total * asked.mem_fraction)}. Taken: weights {_gib(weights)}, "
        f"context, libraries and others {_gib(max(0, taken - weights))}. To come: {_to_come(plan)}. Left: "
        f"{_gib(left)}, and one request of max_model_len={config.max_model_len} needs {_gib(needed)}. "
        + _what_helps(config, plan, needed, room)
    )


def too_many_pages(config: ResolvedConfig, pages: int, page_bytes: int, room: Room) -> str:
    """The given number of pages does not fit."""
    return (
        f"num_pages={pages} takes {_gib(pages * page_bytes)}, and {_free(config, room)}: at most "
        f"num_pages={room.free // page_bytes} fit; without num_pages, as many are used as fit beside the "
        "graphs"
    )


def no_room_for_steps(config: ResolvedConfig, error: BaseException, room: Room) -> str:
    """The buffers of steps, or one trial of each step, do not fit, before the KV cache is allocated."""
    return (
        f"steps of max_running_requests={config.max_running_requests} and "
        f"chunked_prefill_size={config.max_batched_tokens} do not fit beside the weights: "
        f"{_free(config, room)}. {_smaller_steps(config)} ({error})"
    )


def is_short_of_one_request(config: ResolvedConfig, pages: int, page_bytes: int, room: Room) -> str | None:
    """A warning if the longest request does not fit into all the pages together, otherwise None."""
    if pages > config.page_columns:
        return None
    most = (pages - 1) * PAGE_SIZE
    missing = (config.page_columns + 1 - pages) * page_bytes
    fraction = _fraction(room, config.config.mem_fraction, missing)
    helps = f"mem_fraction={fraction:g} or " if fraction is not None else ""
    return (
        f"the KV cache has room for {most} tokens, but requests may have "
        f"max_model_len={config.max_model_len}: longer ones will be refused. Use {helps}max_model_len={most}"
    )


def _what_helps(config: ResolvedConfig, plan: MemoryPlan, needed: int, room: Room) -> str:
    missing = needed - (room.allowed(config.config.mem_fraction) - plan.to_come)
    fraction = _fraction(room, config.config.mem_fraction, missing)
    if fraction is not None:
        return f"Use mem_fraction={fraction:g}"
    short = f"{_gib(needed + plan.to_come - room.allowed(_MOST))} more than available. "
    if plan.activations and plan.activations >= (64 << 20):
        budget = max(1, plan.activations // 2 >> 20)
        short += f"Use cuda_graph_memory_mb={budget} or disable_cuda_graph=True, or: "
    return f"That is {short}{_smaller_steps(config)}"


def _smaller_steps(config: ResolvedConfig) -> str:
    running, tokens = max(1, config.max_running_requests // 4), max(16, config.max_batched_tokens // 4)
    return (
        f"Use max_running_requests={running}, chunked_prefill_size={tokens}, a smaller max_model_len, or "
        "free memory on the device"
    )


def _fraction(room: Room, now: float, missing: int) -> float | None:
    """The smallest fraction, in hundredths, that allows this many more bytes; None: there is none."""
    share = math.ceil(100 * (now + missing / room.total) - 1e-9) / 100
    return share if now < share <= _MOST else None


def _to_come(plan: MemoryPlan) -> str:
    parts = {
        "graphs": (plan.activations or 0) + plan.executables,
        "buffers of steps": plan.buffers,
        "work outside graphs": OUTSIDE_GRAPHS if plan.activations is not None else 0,
    }
    return ", ".join(f"{name} {_gib(size)}" for name, size in parts.items())


def _free(config: ResolvedConfig, room: Room) -> str:
    return f"{_gib(room.free)} of {_gib(room.total)} are free on {config.device}"


def _gib(nbytes: float) -> str:
    return f"{nbytes / 2**30:.2f} GiB" if abs(nbytes) >= 2**28 else f"{nbytes / 2**20:.1f} MiB"
