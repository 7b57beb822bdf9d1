"""What an engine runs with: the given options, and what the model and the machine make of the rest."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch

from ostinato.graphs import ConfigError, GraphMode, Ladder
from ostinato.kernels.constants import PAGE_SIZE

from .capture_sizes import capture_ladders
from .config import DTYPES, EngineConfig
from .speculating.config import SpeculativeConfig


@dataclass(frozen=True)
class ResolvedConfig:
    """All decisions."""

    config: EngineConfig
    device: torch.device
    dtype: torch.dtype
    max_model_len: int
    max_running_requests: int
    max_batched_tokens: int
    graph_mode: GraphMode
    decode_ladder: Ladder
    token_ladder: Ladder

    @cached_property
    def speculation(self) -> SpeculativeConfig | None:
        """How tokens are drafted; None: no drafts."""
        asked = self.config.speculative_config
        return None if asked is None else SpeculativeConfig.parse(asked)

    @property
    def max_drafts(self) -> int:
        """Maximum number of drafts of a request in one step."""
        return 0 if self.speculation is None else self.speculation.num_speculative_tokens

    @property
    def max_positions(self) -> int:
        """Number of positions that a step may compute: drafts may lie beyond the end of a request."""
        return self.max_model_len + self.max_drafts

    @property
    def verify_ladder(self) -> Ladder:
        """Batch sizes, in requests, whose drafts are verified; larger batches get none."""
        assert self.speculation is not None
        limit = min(self.speculation.max_speculative_requests, self.decode_ladder.limit)
        return Ladder([*(size for size in self.decode_ladder if size < limit), limit])

    @property
    def lookahead(self) -> int:
        """Steps launched before the tokens of the last one are read; a CPU gains nothing from it."""
        if self.config.steps_ahead is not None:
            return self.config.steps_ahead
        return 1 if self.device.type == "cuda" else 0

    @property
    def lora_cases(self) -> tuple[int, ...]:
        """Numbers of adapters that graphs are captured for."""
        asked = self.config
        if not asked.serves_adapters:
            return (0,)
        slots = asked.adapter_slots
        return (0, slots) if asked.cudagraph_specialize_lora else (slots,)

    @property
    def max_adapters_on_host(self) -> int:
        """Number of adapters kept in host memory while unused."""
        return self.config.max_cpu_loras or max(8, self.config.adapter_slots)

    @property
    def max_step_tokens(self) -> int:
        """Tokens of the largest step, padding included."""
        verified = 0 if self.speculation is None else self.verify_ladder.limit * (1 + self.max_drafts)
        return max(self.max_batched_tokens, self.token_ladder.limit, self.decode_ladder.limit, verified)

    @property
    def page_columns(self) -> int:
        """Pages of the longest request."""
        return -(-self.max_positions // PAGE_SIZE)

    @property
    def max_rows(self) -> int:
        """Request rows, the reserved row 0 included."""
        return self.max_running_requests + 1

    @property
    def context_buckets(self) -> tuple[int | None, ...]:
        """Context lengths of decode graphs: attention without a kernel pays for the whole length."""
        if self.device.type == "cuda" or self.config.batch_invariant:
            return (None,)
        buckets: list[int | None] = []
        size = 128
        while size < self.max_model_len:
            buckets.append(size)
            size *= 4
        return (*buckets, self.page_columns * PAGE_SIZE)

    @property
    def warmups(self) -> int:
        """Runs before a recording: none on a CPU; one on a GPU, because kernels are compiled beforehand."""
        return 1 if self.device.type == "cuda" else 0


def resolve(asked: EngineConfig, model_limit: int, model_dtype: torch.dtype) -> ResolvedConfig:
    """All decisions, for a model with this length limit and weight type, on this machine."""
    device = device_of(asked.device)
    on_gpu = device.type == "cuda"
    dtype = DTYPES.get(asked.dtype) or (model_dtype if on_gpu else torch.float32)
    longest = asked.max_model_len or min(model_limit, 8192 if on_gpu else 2048)
    if longest > model_limit:
        raise ConfigError(f"max_model_len {longest} is beyond the model's own limit of {model_limit}")
    running = asked.max_running_requests or (256 if on_gpu else 16)
    tokens = max(_chunk_size(asked, on_gpu), running)
    if not asked.enable_chunked_prefill:
        tokens = max(tokens, longest)
    mode = _graph_mode(asked, on_gpu)
    decode_ladder, token_ladder = capture_ladders(asked, mode, running, tokens, on_gpu=on_gpu)
    return ResolvedConfig(
        config=asked,
        device=device,
        dtype=dtype,
        max_model_len=longest,
        max_running_requests=running,
        max_batched_tokens=tokens,
        graph_mode=mode,
        decode_ladder=decode_ladder,
        token_ladder=token_ladder,
    )


def _graph_mode(asked: EngineConfig, on_gpu: bool) -> GraphMode:
    if asked.is_eager:
        return GraphMode.NONE
    if asked.batch_invariant:
        return GraphMode.FULL  # attention between graphs has varying shapes
    if asked.cuda_graph_mode != "auto":
        return GraphMode.parse(asked.cuda_graph_mode)
    has_kernels = asked.attention_backend == "triton" or (on_gpu and asked.attention_backend == "auto")
    return GraphMode.FULL if has_kernels else GraphMode.FULL_AND_PIECEWISE


def _chunk_size(asked: EngineConfig, on_gpu: bool) -> int:
    if asked.chunked_prefill_size is not None:
        return asked.chunked_prefill_size
    if asked.batch_invariant and on_gpu:
        return 256  # every step pays for as many tokens
    return 4096 if on_gpu else 128


def _own_device() -> torch.device:
    """The GPU that this process works on: the first, unless another one has been set."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device() if torch.cuda.is_initialized() else 0)


def device_of(name: str) -> torch.device:
    """The device of this name (auto, cpu, cuda, cuda:N); ConfigError if there is none."""
    if name == "auto":
        return _own_device()
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cpu", "cuda"):
        raise ConfigError(f"unknown device {name!r}: use auto, cpu, cuda or cuda:N")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"device is {name!r}, but torch finds no GPU: use cpu")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(f"device is {name!r}, but torch finds {torch.cuda.device_count()} GPUs")
    # Tensors always have a device number, so the configuration has one too.
    return torch.device("cuda", device.index or 0) if device.type == "cuda" else device
