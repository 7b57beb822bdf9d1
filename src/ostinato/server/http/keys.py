"""Who may ask for what: bearer keys and their quotas, and loopback for admins without a key."""

from __future__ import annotations

import ipaddress
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..openai.errors import ApiError, refused
from ..tenants.key_file import Scope as KeyScope
from ..tenants.key_table import KeyTable, unauthorized
from ..tenants.quotas import Quota, Refusal
from ..tenants.tenant import current_key, current_tenant
from .json_answers import error_response

OPEN_PATHS = frozenset({"/", "/health", "/ping", "/metrics", "/stats", "/version"})
"""Answered without a key: for probes, scrapers and the page. None of them shows what anybody asked."""

METRICS_PATHS = frozenset({"/metrics", "/stats"})
"""Open, unless some key is for metrics."""

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


def scope_needed(keys: KeyTable, path: str) -> KeyScope | None:
    """Returns the scope that a key needs for this path; None: none is needed."""
    if path in ADMIN_PATHS and keys.has_admins:
        return "admin"
    if path in METRICS_PATHS and keys.guards_metrics:
        return "metrics"
    return "inference" if keys.is_needed and path not in OPEN_PATHS else None


def bearer_key(authorization: bytes) -> bytes:
    """Returns the key in the value of an Authorization header; empty: there is none."""
    scheme, _, given = authorization.partition(b" ")
    return given.strip() if scheme.lower() == b"bearer" else b""


class KeyCheck:
    """Middleware in front of everything that needs a key. Most requests without a valid one end before it, in
    `KeyGate`."""

    def __init__(self, app: ASGIApp, keys: KeyTable, *, open_admin: bool) -> None:
        self._app = app
        self._keys = keys
        self._is_open = open_admin

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on, or answer 401, 403 or 429."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        quota = current_tenant.get().quota
        has_begun = False
        try:
            self._check(scope)
            quota = current_tenant.get().quota
            if quota.limits.are_any and scope["method"] == "POST" and scope["path"] not in ADMIN_PATHS:
                _begin(quota)
                has_begun = True
        except ApiError as error:
            await error_response(error)(scope, receive, send)
            return
        if not has_begun:
            await self._app(scope, receive, send)
            return

        async def told(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(quota.headers)
            await send(message)

        try:
            await self._app(scope, receive, told)
        finally:
            quota.end()

    def _check(self, scope: Scope) -> None:
        path, headers, keys = scope["path"], Headers(scope=scope), self._keys
        if path in ADMIN_PATHS and not keys.has_admins and not self._is_open:
            _check_local(scope, headers)
        needed = scope_needed(keys, path)
        if needed is not None:
            self._check_bearer(headers, needed)
        else:
            client = scope.get("client")
            current_tenant.set(keys.addresses.of("" if client is None else client[0]))

    def _check_bearer(self, headers: Headers, scope: KeyScope) -> None:
        try:
            key = self._keys.key(bearer_key(headers.get("authorization", "").encode("latin-1")))
        except Refusal as refusal:
            raise refused(refusal) from None
        if scope not in key.scopes:
            if not key.is_of_file:
                raise refused(unauthorized("the API key is wrong"))
            scopes = ", ".join(sorted(key.scopes))
            message = f"the key {key.name!r} is not for this: it has the scopes {scopes}"
            raise ApiError(403, message, code="insufficient_scope")
        current_tenant.set(self._keys.tenant(key))
        current_key.set(key.digest)


def _begin(quota: Quota) -> None:
    try:
        quota.begin()
    except Refusal as refusal:
        raise refused(refusal) from None


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
