"""The messages between the HTTP process and the engine process: typed, msgpack, fields by position."""

from __future__ import annotations

from enum import StrEnum
from typing import Any

import msgspec

from ostinato.engine.parameters.sampling_params import SamplingParams

packed = msgspec.msgpack.Encoder().encode
unpacked = msgspec.msgpack.Decoder(dict[str, Any]).decode
NOTHING = packed({})

# -- to the engine ---------------------------------------------------------------------------------


class Generate(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """Compute one or several completions of a prompt, which share its lists."""

    id: int
    """Of the first; the others have the numbers behind it."""
    prompt_ids: list[int]
    params: SamplingParams
    cache_salt: str | None = None
    """Only requests with the same one share prefixes."""
    adapter: str | None = None
    """By name."""
    num: int = 1
    """Completions."""
    tenant: str = ""
    """Whose they are."""
    weight: float = 1.0
    """Of the tenant."""


JUDGED = "judged"


class Embed(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """Compute one vector; `pooling` is last or mean, or `JUDGED` for what the model's head says."""

    id: int
    prompt_ids: list[int]
    pooling: str
    adapter: str | None = None
    cache_salt: str | None = None
    tenant: str = ""
    weight: float = 1.0


class Abort(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """Nobody wants these requests any more."""

    ids: list[int]
    silent: bool = True
    """Whether the sender has forgotten them already; else each is answered with a last `News`."""


class Call(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """Do something between two steps and reply: see `engine_process.controls` for what there is."""

    call: int
    name: str
    payload: bytes = NOTHING
    """Its arguments by name, as `packed` makes them."""


class Stop(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """Leave."""


Command = Generate | Embed | Abort | Call | Stop


# -- from the engine -------------------------------------------------------------------------------

TokenLogprobs = list[tuple[int, float, int | None]]
"""Token id, logprob and rank; the sampled token comes first."""


class News(msgspec.Struct, array_like=True, frozen=True):
    """What a step brought one request."""

    id: int
    token: int | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    cached_tokens: int = 0
    """Known with the first token."""
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: dict[int, TokenLogprobs] | None = None
    """By position, as far as this step computed them."""
    embedding: bytes | None = None
    """Little-endian float32."""
    error: str | None = None
    refused: bool = False
    """Whether the request itself is at fault for the error."""
    queued_seconds: float = 0.0
    """From its arrival in the engine's process to its first step; told with the first news."""
    drafts: tuple[list[int], list[int]] | None = None
    """Told with the end: how many tokens were drafted in each step that verified some, and accepted."""
    lacks_adapter: bool = False
    """Whether it was refused because its adapter is not loaded, or not any more."""


class StepNews(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """All that one step brought. Most of it is a token and nothing else, which goes in two plain lists."""

    ids: list[int]
    tokens: list[int]
    """The next token of each of `ids`; none of them has ended, and each has had news before."""
    news: list[News]


class Loading(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """How far the start is."""

    text: str


class AdapterInfo(msgspec.Struct, frozen=True):
    """One adapter that is loaded."""

    name: str
    id: int
    path: str
    """Empty: it came as tensors."""
    pinned: bool
    digest: str
    """Of its contents."""


class Ready(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """The engine serves. What the HTTP process must know of it."""

    directory: str
    tokenizer_directory: str
    architecture: str
    max_model_len: int
    max_running: int
    vocab_size: int
    hidden_size: int
    has_tokenizer: bool
    can_generate: bool
    eos_token_ids: list[int]
    default_sampling: dict[str, float | int]
    """Of requests that do not say: fields of `SamplingParams`."""
    summary: str
    can_sleep: bool = False
    """Whether memory can be given back."""
    max_logprobs: int = 20
    """Per token; -1: of the whole vocabulary."""
    has_logits_processors: bool = False
    """Whether classes of the server's owner change logits."""
    adapters: list[AdapterInfo] = []
    """Loaded at the start."""
    lost_adapters: dict[str, str] = {}
    """Those that the engine before had and this one could not load again, and why."""
    vllm_config: dict[str, Any] = {}
    """What trainers read of vLLM's, under its names."""
    most_drafts: int = 0
    """Of a step; 0: none are made."""
    pooling: str = "last"
    """Of embeddings that do not say."""
    preferred_sampling: dict[str, float | int] = {}
    """Of `default_sampling` what the server's owner has chosen, and no file of the model's."""
    num_labels: int = 0
    """What its head tells texts apart by; 0: it has none."""


class Fault(StrEnum):
    """Why a call was not carried out."""

    CALLER = "caller"
    """What was asked is wrong, or cannot be."""
    STATE = "state"
    """Not now: the engine sleeps."""
    MEMORY = "memory"
    """For want of memory; nothing has changed, and another attempt may succeed."""
    TIME = "time"
    """Somebody else did not come in time."""
    ENGINE = "engine"
    """It failed."""


class Reply(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """The answer to a `Call`: JSON, or what went wrong."""

    call: int
    result: bytes = b"null"
    error: str | None = None
    fault: Fault = Fault.ENGINE
    """Whose the error is."""


class Standing(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """How the engine stands between two controls; told whenever it has changed, before the reply."""

    weight_version: str = ""
    is_paused: bool = False
    is_sleeping: bool = False
    why_no_step: str | None = None
    """Why no step is taken; None: steps are."""


class Beat(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """The engine's process runs."""

    step_seconds: float
    """How long its loop has been at the same step."""


class Failed(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """The engine gives up; the process exits next."""

    error: str


class GraphCounters(msgspec.Struct, array_like=True, frozen=True):
    """One rung: graphs of the same mode, kind and size, taken together."""

    mode: str
    kind: str
    """decode, mixed or sampling."""
    rung: int
    """Its tokens; for sampling its requests."""
    graphs: int
    replays: int
    padded_rows: int
    rows: int
    """All rows replayed, padding included."""
    bytes: int
    capture_seconds: float


class DraftCounters(msgspec.Struct, array_like=True, frozen=True):
    """What drafts brought, in total."""

    method: str
    num_drafts: int
    """Verifications, one for each request of each step."""
    num_draft_tokens: int
    num_accepted_tokens: int
    accepted_per_position: list[int]
    mean_acceptance_length: float
    """Tokens that a verification brings."""
    speed_up: float | None
    """By how much drafts make a batch of the present size faster, if that was measured."""
    steps_without: dict[str, int]
    eager_steps: dict[str, int]


class Statistics(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """The counters of the engine at one moment."""

    running: int
    waiting: int
    is_paused: bool
    pages_usable: int
    pages_free: int
    pages_cached: int
    prefix_queried_tokens: int
    prefix_hit_tokens: int
    preemptions: int
    steps: int
    cpu_microseconds: dict[str, float]
    """CPU time of the engine's thread by part of a step, in total."""
    device_idle_share: float
    """Of the time since the last message."""
    idle_source: str
    """device: measured on the device; host: the share of time in which no step was under way."""
    graph_mode: str
    backend: str
    device: str
    graphs: list[GraphCounters]
    eager_steps: dict[str, int]
    sampling_eager_steps: dict[str, int]
    memory_bytes: dict[str, int]
    page_size: int
    """Tokens of a page."""
    device_bytes: tuple[int, int]
    """Memory of the device, and what of it is free; zeros where it cannot be asked."""
    max_adapters: int = 0
    """In one step; 0: none are served."""
    running_adapters: list[str] = []
    waiting_adapters: list[str] = []
    drafts: DraftCounters | None = None
    """Where tokens are drafted."""


Event = StepNews | Loading | Ready | Reply | Standing | Beat | Failed | Statistics

encode = msgspec.msgpack.Encoder().encode
decode_command = msgspec.msgpack.Decoder(Command).decode
decode_event = msgspec.msgpack.Decoder(Event).decode
