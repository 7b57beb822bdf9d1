"""Server options. Each field is a flag of `ostinato serve`; its docstring is the help text."""

from __future__ import annotations

import json
import re
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
"""Names of tool call formats, including those of vLLM and SGLang, and the format that each one selects."""

_ORIGIN = re.compile(r"\*|null|[a-z][a-z0-9+.-]*://[^/\s\"\[\]]+|[a-z][a-z0-9+.-]*://\[[0-9a-f:.]+\](:\d+)?")


@dataclass(frozen=True)
class ServerConfig:
    """Options of the HTTP server; those of the engine are in `EngineConfig`."""

    host: str = "127.0.0.1"
    """Address to listen on; 0.0.0.0 for all addresses."""
    port: int = 8000
    """Port to listen on; 0 picks a free one and prints it."""
    served_model_name: str | None = None
    """The model's name in the API; default: the model name or path exactly as given."""
    chat_template: str | None = None
    """Chat template, as a file or as the template's text; default: the model's own."""
    content_special_tokens: str = "text"
    """How special tokens in what clients write into a conversation are read: text, so that nobody can begin
    another message inside of one; or parse, as if the chat template had written them."""
    trust_request_chat_template: bool = False
    """Accept chat templates from clients. They run in a sandbox, but can keep a thread busy."""
    api_key: Sequence[str] = ()
    """Key that clients must send as a bearer token; without any key the API is open to everyone."""
    api_keys_file: str | None = None
    """File of keys with their names, weights, scopes, expiry dates and quotas, in JSON or TOML; it is read
    again when it changes."""
    admin_key: str | None = None
    """Key for the admin endpoints; without one they can be reached from loopback addresses only."""
    share_prefixes: bool = False
    """Let requests with different API keys share cached prefixes, which shows in times and `cached_tokens`
    that somebody else has asked the same."""
    open_admin: bool = False
    """Allow everyone who may use the API to call the admin endpoints, from any address; for example a trainer
    on another machine that has no admin key."""
    max_body_mb: float = 8.0
    """Largest request body, in MiB."""
    max_prompt_tokens: int | None = None
    """Longest prompt, in tokens; default: limited only by max_model_len."""
    max_queued_requests: int = 4096
    """Maximum number of completions waiting to run; further requests get HTTP status 429."""
    max_connections: int = 8192
    """Maximum number of open connections. Beyond it idle connections are closed to make room, and a few more
    are accepted for probes and admin calls."""
    max_connections_per_client: int | None = None
    """Maximum number of open connections of one address, or of one IPv6 network (/64); default: an eighth of
    max_connections, and no limit for loopback. Behind a proxy, which is one address, set it to
    max_connections and let the proxy count."""
    max_half_sent_mb: float | None = None
    """MiB of requests that have begun to arrive and are not complete; beyond it the client with the most
    loses its oldest. Default: 16 bodies of max_body_mb."""
    max_half_sent_mb_per_client: float | None = None
    """The same of one address; default: a quarter of max_half_sent_mb, and no limit for loopback."""
    probe_port: int | None = None
    """A second port, with its own connections, for /health, /ping, /metrics and /version alone: it answers
    while all connections of the other one are taken, and needs no keys. 0 picks a free one and prints it."""
    client_timeout: float = 30.0
    """Seconds that a client may take to send its headers, to send its body, and to continue reading an
    answer."""
    request_timeout: float = 600.0
    """Seconds after which an unfinished request ends with an error."""
    stream_interval: int = 1
    """Tokens per chunk of a stream, after the first chunk; larger values make HTTP cheaper and streams
    coarser."""
    grace_seconds: float = 30.0
    """Seconds that running requests get to finish after SIGINT or SIGTERM."""
    restart_engine: bool = False
    """Restart the engine if its process dies or hangs, instead of exiting."""
    max_engine_restarts: int = 5
    """Number of restarts in a row, with less than a minute of service between them, after which the server
    exits."""
    heartbeat_timeout: float = 10.0
    """Seconds without a heartbeat from the engine's process after which it counts as hung."""
    step_timeout: float | None = None
    """Seconds that one step of the engine may take before it counts as hung; default: 120 on a GPU, 900 on a
    CPU."""
    stall_timeout: float = 60.0
    """Seconds that the HTTP process may stand still before it is killed, and the engine with it (Linux)."""
    tool_call_parser: str = "auto"
    """Format of the model's tool calls: qwen (or hermes, qwen25), llama (or llama3_json) or none; auto:
    detected from its chat template."""
    enable_log_requests: bool = False
    """Log a line when a request arrives and when it ends."""
    disable_log_stats: bool = False
    """Turn off the throughput log, otherwise written every ten seconds while requests run."""
    profile_dir: str = "profiles"
    """Directory where /start_profile writes its traces."""
    metrics_prefix: str = "ostinato"
    """Prefix of the metrics that vLLM and SGLang have too; vllm, sglang or sglang_ match their dashboards."""
    per_request_spec_decode_metrics: str = "none"
    """What an answer reports about its drafts in `metrics.speculative_decoding`: none, summary, or detailed
    (step by step). As in vLLM, not available with n above 1."""
    allowed_origins: Sequence[str] = ()
    """Origins whose web pages may use the API from a browser (CORS), such as https://page.example:8080;
    * allows all. A JSON list, as vLLM has it, works too."""

    def __post_init__(self) -> None:
        for name, read in (("api_key", tuple), ("allowed_origins", _origins)):
            given = getattr(self, name)
            object.__setattr__(self, name, read((given,) if isinstance(given, str) else given))
        keys = self.api_key
        if any(not key for key in keys) or self.admin_key == "":
            raise ConfigError("an API key must not be empty")
        if self.open_admin and self.admin_key is not None:
            raise ConfigError("open_admin and admin_key exclude each other: give only one of them")
        for name in ("port", "probe_port"):
            if not 0 <= (getattr(self, name) or 0) < 65536:
                raise ConfigError(f"{name} must be 0 to 65535, not {getattr(self, name)}")
        if self.probe_port and self.probe_port == self.port:
            raise ConfigError("probe_port and port must not be the same")
        for name in (
            *("max_body_mb", "request_timeout", "client_timeout", "max_connections"),
            *("heartbeat_timeout", "step_timeout", "stall_timeout", "max_connections_per_client"),
            *("max_half_sent_mb", "max_half_sent_mb_per_client"),
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
        if (given := self.content_special_tokens) not in ("text", "parse"):
            raise ConfigError(f"unknown content_special_tokens {given!r}: use text or parse")
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


def _origins(given: Sequence[str]) -> tuple[str, ...]:
    """Each as a browser writes it: one that is written differently would allow nobody, without a word."""
    found: list[str] = []
    for text in given:
        try:
            listed = json.loads(text) if text.startswith("[") else text.split(",")
        except ValueError:
            listed = [text]
        found += [str(origin).strip().lower() for origin in listed]
    for origin in found:
        if not _ORIGIN.fullmatch(origin):
            message = (
                f"allowed_origins: {origin!r} is no origin: write scheme://host or scheme://host:port, or *"
            )
            raise ConfigError(message)
    return tuple(found)
