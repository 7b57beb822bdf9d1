"""Decides which sizes are captured, from Ostinato's, vLLM's or SGLang's options.

These options decide nothing else: they change neither how many requests run nor how prompts are cut.
"""

from __future__ import annotations

import logging
from typing import Protocol

from ostinato.graphs import ConfigError, GraphMode, Ladder

logger = logging.getLogger("ostinato.engine")

_OURS = ("cuda_graph_bs", "cuda_graph_max_bs", "cuda_graph_prefill_tokens")
_THEIRS = ("cudagraph_capture_sizes", "max_cudagraph_capture_size")
_LADDERS = {"sglang": Ladder.sglang, "vllm": Ladder.vllm, "dense": Ladder.dense}


class AskedSizes(Protocol):
    """The options of an `EngineConfig` about sizes."""

    @property
    def cuda_graph_bs(self) -> tuple[int, ...] | None:
        """Decode batches."""

    @property
    def cuda_graph_max_bs(self) -> int | None:
        """The largest decode batch."""

    @property
    def cuda_graph_prefill_tokens(self) -> tuple[int, ...] | None:
        """Mixed steps."""

    @property
    def cuda_graph_ladder(self) -> str:
        """Which default list."""

    @property
    def cudagraph_capture_sizes(self) -> tuple[int, ...] | None:
        """vLLM's list."""

    @property
    def max_cudagraph_capture_size(self) -> int | None:
        """vLLM's limit."""

    @property
    def batch_invariant(self) -> bool:
        """One size for all."""


def check_capture_sizes(config: AskedSizes) -> None:
    """Raise ConfigError for options that contradict each other."""
    ours, theirs = _given(config, _OURS), _given(config, _THEIRS)
    ladder = config.cuda_graph_ladder
    chosen = ["cuda_graph_ladder"] if ladder != "auto" else []
    if chosen and ladder not in _LADDERS:
        raise ConfigError(f"unknown cuda_graph_ladder {ladder!r}: use auto, sglang, vllm or dense")
    explicit = _given(config, ("cuda_graph_bs", "cudagraph_capture_sizes"))
    if chosen and explicit:
        raise ConfigError(f"give cuda_graph_ladder or {explicit[0]}, not both: a list is its own ladder")
    if config.cuda_graph_bs is not None and config.cuda_graph_max_bs is not None:
        raise ConfigError("give cuda_graph_bs or cuda_graph_max_bs, not both: a list has its own maximum")
    if theirs and ours:
        raise ConfigError(f"give {theirs[0]} (in tokens, as vLLM does) or {ours[0]}, not both")
    if len(theirs) == 2:
        raise ConfigError(
            "give cudagraph_capture_sizes or max_cudagraph_capture_size, not both: a list has a maximum"
        )
    if config.max_cudagraph_capture_size is not None and config.max_cudagraph_capture_size < 1:
        raise ConfigError(
            f"max_cudagraph_capture_size must be at least 1, not {config.max_cudagraph_capture_size}: "
            "use disable_cuda_graph to capture none"
        )
    given = [*ours, *theirs, *chosen]
    if given and config.batch_invariant:
        raise ConfigError(f"batch_invariant captures one shape, of chunked_prefill_size: remove {given[0]}")


def capture_ladders(
    config: AskedSizes, mode: GraphMode, running: int, tokens: int, *, on_gpu: bool
) -> tuple[Ladder, Ladder]:
    """The captured decode batches, in requests, and the captured mixed steps, in tokens.

    No step ever has more than `running` requests or `tokens` tokens.
    """
    decode = _decode_ladder(config, mode, running, on_gpu)
    mixed = _token_ladder(config, tokens, on_gpu)
    if _given(config, _THEIRS):
        logger.warning(
            "capture sizes in tokens became cuda_graph_bs %s and cuda_graph_prefill_tokens %s",
            ",".join(map(str, decode)),
            ",".join(map(str, mixed)),
        )
    if mode.mixed is not GraphMode.NONE and mixed.limit < tokens:
        logger.warning(
            "steps have up to %d tokens (chunked_prefill_size) and graphs up to %d: larger steps run without",
            tokens,
            mixed.limit,
        )
    return decode, mixed


def _decode_ladder(config: AskedSizes, mode: GraphMode, running: int, on_gpu: bool) -> Ladder:
    if config.cuda_graph_bs is not None:
        ladder = Ladder(config.cuda_graph_bs)
        if ladder.limit > running:
            raise ConfigError(f"cuda_graph_bs reaches {ladder.limit}, but at most {running} requests run")
        return ladder
    if config.cudagraph_capture_sizes is not None:
        # A size that is no decode batch still applies to prefill.
        sizes = {size for size in config.cudagraph_capture_sizes if size <= running}
        if not sizes:
            asked = list(config.cudagraph_capture_sizes)
            raise ConfigError(f"no size of {asked} is a decode batch: at most {running} requests run")
        return Ladder(sizes)
    wanted = config.cuda_graph_max_bs or config.max_cudagraph_capture_size or running
    if config.cuda_graph_max_bs is not None and wanted > running and mode is not GraphMode.NONE:
        logger.warning(
            "cuda_graph_max_bs %d is lowered: max_running_requests is %d, so no larger batch ever runs",
            wanted,
            running,
        )
    limit = min(wanted, running)
    if config.cuda_graph_ladder != "auto":
        return _LADDERS[config.cuda_graph_ladder](limit)
    return Ladder.sglang(limit) if on_gpu else _doubling(1, limit)


def _token_ladder(config: AskedSizes, tokens: int, on_gpu: bool) -> Ladder:
    if config.cuda_graph_prefill_tokens is not None:
        return Ladder(config.cuda_graph_prefill_tokens)
    if config.cudagraph_capture_sizes is not None:
        return Ladder(set(config.cudagraph_capture_sizes))
    if config.batch_invariant:
        return Ladder([tokens])
    limit = min(config.max_cudagraph_capture_size or tokens, tokens)
    return Ladder.prefill(limit) if on_gpu else _doubling(8, limit)


def _given(config: AskedSizes, names: tuple[str, ...]) -> list[str]:
    return [name for name in names if getattr(config, name) is not None]


def _doubling(first: int, limit: int) -> Ladder:
    """Few rungs, for a CPU: a recording there takes as long as a step or two."""
    sizes = []
    while first < limit:
        sizes.append(first)
        first *= 2
    return Ladder([*sizes, limit])
