"""What can be set about a server. Each field is a flag of `ostinato serve`; its docstring is the help."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ostinato.graphs.errors import ConfigError

TOOL_CALL_PARSERS = {
    "auto": "auto",
    "none": "none",
    "qwen": "qwen",
    "qwen25": "qwen",
    "hermes": "qwen",
    "llama": "llama",
    "llama3": "llama",
    "llama3_json": "llama",
    "llama4_json": "llama",
}
"""Names of layouts of tool calls, those of vLLM and SGLang among them, and what each is here."""


@dataclass(frozen=True)
class ServerConfig:
    """The HTTP side; the engine has its own, `EngineConfig`."""

    host: str = "127.0.0.1"
    """Address to listen on; 0.0.0.0 for all."""
    port: int = 8000
    """Port to listen on; 0 takes a free one and says which."""
    served_model_name: str | None = None
    """The model's name in the API; default: the model as it was given, a path as it was written."""
    chat_template: str | None = None
    """A file with a chat template, or the template itself; default: the model's own."""
    trust_request_chat_template: bool = False
    """Run chat templates that clients send, in a sandbox; a client can then keep a thread busy."""
    api_key: Sequence[str] = ()
    """A key that clients must send as a bearer token; without any, the API is open."""
    admin_key: str | None = None
    """The key of the admin endpoints; without one they answer to loopback only."""
    open_admin: bool = False
    """Answer the admin endpoints to whoever may use the API, from wherever: a trainer on another machine
    without a key of its own."""
    max_body_mb: float = 8.0
    """Largest request body, in MiB."""
    max_prompt_tokens: int | None = None
    """Longest prompt, in tokens; default: what the model length leaves room for."""
    max_queued_requests: int = 4096
    """Completions that may wait for their turn; beyond that, requests are answered 429."""
    max_connections: int = 8192
    """Connections at once; beyond that, silent ones make room, and a reserve is for probes and admins."""
    client_timeout: float = 30.0
    """Seconds that a client may take for its headers, for its body, and for reading on."""
    request_timeout: float = 600.0
    """Seconds after which an unfinished request is ended with an error."""
    stream_interval: int = 1
    """Tokens in a chunk of a stream behind the first; more make HTTP cheaper and streams coarser."""
    grace_seconds: float = 30.0
    """Seconds that running requests have to finish after SIGINT or SIGTERM."""
    restart_engine: bool = False
    """Start the engine again when its process dies or hangs, instead of exiting."""
    max_engine_restarts: int = 5
    """Restarts in a row, without a minute of service between them, after which the server exits."""
    heartbeat_timeout: float = 10.0
    """Seconds without a sign of life from the engine's process after which it counts as hung."""
    step_timeout: float | None = None
    """Seconds that one step of the engine may take before it counts as hung; default: 120 on a GPU, 900 on a
    CPU."""
    tool_call_parser: str = "auto"
    """How the model writes tool calls: qwen (or hermes, qwen25), llama (or llama3_json), none; auto: by its
    chat template."""
    enable_log_requests: bool = False
    """Log a line for each request when it comes and when it has ended."""
    disable_log_stats: bool = False
    """Log no throughput, which is otherwise told every ten seconds while there is any."""
    profile_dir: str = "profiles"
    """Where /start_profile leaves its traces."""
    metrics_prefix: str = "ostinato"
    """Prefix of the metrics that vLLM and SGLang have too; vllm, sglang or sglang_ suits their dashboards."""
    per_request_spec_decode_metrics: str = "none"
    """What an answer says about its drafts, in `metrics.speculative_decoding`: none, summary, or detailed,
    step by step. As in vLLM, not with n above 1."""
    allowed_origins: Sequence[str] = ()
    """Origins whose web pages may use the API from a browser (CORS); * for all."""

    def __post_init__(self) -> None:
        for name in ("api_key", "allowed_origins"):
            given = getattr(self, name)
            object.__setattr__(self, name, (given,) if isinstance(given, str) else tuple(given))
        keys = self.api_key
        if any(not key for key in keys) or self.admin_key == "":
            raise ConfigError("an API key must not be empty")
        if self.open_admin and self.admin_key is not None:
            raise ConfigError("open_admin is for servers without an admin_key: give one of them")
        if not 0 <= self.port < 65536:
            raise ConfigError(f"port must be 0 to 65535, not {self.port}")
        for name in (
            *("max_body_mb", "request_timeout", "client_timeout", "max_connections"),
            *("heartbeat_timeout", "step_timeout"),
        ):
            given = getattr(self, name)
            if given is not None and given <= 0:
                raise ConfigError(f"{name} must be above 0, not {getattr(self, name)}")
        for name in ("max_queued_requests", "grace_seconds", "max_engine_restarts"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} must be at least 0, not {getattr(self, name)}")
        if self.stream_interval < 1:
            raise ConfigError(f"stream_interval must be at least 1, not {self.stream_interval}")
        if self.max_prompt_tokens is not None and self.max_prompt_tokens < 1:
            raise ConfigError(f"max_prompt_tokens must be at least 1, not {self.max_prompt_tokens}")
        if (given := self.per_request_spec_decode_metrics) not in ("none", "summary", "detailed"):
            raise ConfigError(
                f"unknown per_request_spec_decode_metrics {given!r}: use none, summary or detailed"
            )
        if self.tool_call_parser not in TOOL_CALL_PARSERS:
            known = ", ".join(TOOL_CALL_PARSERS)
            raise ConfigError(f"unknown tool_call_parser {self.tool_call_parser!r}: use {known}")

    @property
    def max_body_bytes(self) -> int:
        """Largest request body."""
        return int(self.max_body_mb * 2**20)
