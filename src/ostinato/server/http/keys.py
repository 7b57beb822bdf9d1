"""Who may ask for what: bearer keys, compared in constant time, and loopback for admins without a key."""

from __future__ import annotations

import hmac
import ipaddress
from collections.abc import Sequence
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from ..config import ServerConfig
from ..openai.errors import ApiError
from ..tenant import current_tenant, tenant_of
from .json_answers import error_response

OPEN_PATHS = frozenset({"/", "/health", "/ping", "/metrics", "/stats", "/version"})
"""Answered without a key: for probes, scrapers and the page. None of them shows what anybody asked."""

WEIGHT_PATHS = frozenset(
    {
        "/close_communicator",
        "/collective_rpc",
        "/destroy_weights_update_group",
        "/finish_weight_update",
        "/get_weights_by_name",
        "/init_communicator",
        "/init_weight_transfer_engine",
        "/init_weights_update_group",
        "/start_draft_weight_update",
        "/start_weight_update",
        "/update_named_param",
        "/update_weight_version",
        "/update_weights",
        "/update_weights_from_disk",
        "/update_weights_from_distributed",
        "/update_weights_from_ipc",
        "/update_weights_from_tensor",
        "/weights_checker",
    }
)
"""For trainers: what `weight_routes` has beside names of versions, and `trl_routes` beside rollouts."""
ADMIN_PATHS = WEIGHT_PATHS | frozenset(
    {
        "/abort",
        "/graphs",
        "/start_profile",
        "/stop_profile",
        # adapters
        "/v1/load_lora_adapter",
        "/v1/unload_lora_adapter",
        "/load_lora_adapter",
        "/load_lora_adapter_from_tensors",
        "/unload_lora_adapter",
        # sleep and pause, as vLLM has them
        "/abort_requests",
        "/get_world_size",
        "/is_paused",
        "/is_sleeping",
        "/pause",
        "/reset_encoder_cache",
        "/reset_mm_cache",
        "/reset_prefix_cache",
        "/reset_prefix_cache/",
        "/resume",
        "/sleep",
        "/wake_up",
        "/wakeup",
        # and SGLang
        "/abort_request",
        "/continue_generation",
        "/flush_cache",
        "/pause_generation",
        "/release_memory_occupation",
        "/resume_memory_occupation",
    }
)


class KeyCheck:
    """Middleware in front of everything."""

    def __init__(self, app: ASGIApp, config: ServerConfig) -> None:
        self._app = app
        self._keys = tuple(key.encode() for key in config.api_key)
        self._admin_keys = (config.admin_key.encode(),) if config.admin_key else ()
        self._is_open = config.open_admin
        all_keys = {*self._keys, *self._admin_keys}
        self._tells_apart = len(all_keys) > 1 and not config.share_prefixes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on, or answer 401 or 403."""
        if scope["type"] == "http":
            try:
                self._check(scope)
            except ApiError as error:
                await error_response(error)(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _check(self, scope: Scope) -> None:
        path, headers = scope["path"], Headers(scope=scope)
        if path in ADMIN_PATHS:
            if self._admin_keys:
                self._check_bearer(headers, self._admin_keys)
                return
            if not self._is_open:
                _check_local(scope, headers)
                return
        if self._keys and path not in OPEN_PATHS:
            self._check_bearer(headers, (*self._keys, *self._admin_keys))

    def _check_bearer(self, headers: Headers, keys: Sequence[bytes]) -> None:
        scheme, _, given = headers.get("authorization", "").partition(" ")
        sent = given.strip().encode("latin-1") if scheme.lower() == "bearer" else b""
        # All of them, always: the time taken tells nothing about which came close.
        matches = [hmac.compare_digest(sent, key) for key in keys]
        if not any(matches):
            what = "the API key is wrong" if sent else "an API key is needed, as a bearer token"
            raise ApiError(401, what, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})
        if self._tells_apart:
            current_tenant.set(tenant_of(sent))


def _check_local(scope: Scope, headers: Headers) -> None:
    """Loopback, and neither through a proxy nor from a web page that makes a local browser ask."""
    client = scope.get("client")
    is_local = (
        client is not None
        and _is_loopback(client[0])
        and _is_loopback(_host_of(headers.get("host", "")))
        and not any(name in headers for name in ("forwarded", "x-forwarded-for", "x-real-ip"))
    )
    origin = headers.get("origin")
    is_foreign = headers.get("sec-fetch-site", "none") not in ("none", "same-origin")
    if not is_local or is_foreign or (origin is not None and _origin_host(origin) != headers.get("host")):
        raise ApiError(403, "without --admin-key, admin endpoints answer to loopback only", code="admin_only")


def _host_of(given: str) -> str:
    """The name or address in a Host header, without its port."""
    return given[1:].partition("]")[0] if given.startswith("[") else given.partition(":")[0]


def _origin_host(origin: str) -> str | None:
    """Host and port of an origin; None if it is not one."""
    try:
        return urlsplit(origin).netloc
    except ValueError:
        return None


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
