"""The application: routes, middleware, and every error in OpenAI's shape."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import partial
from typing import Any

from fastapi import APIRouter, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.routing import Route

from ostinato import __version__

from ..openai.body import REFUSALS
from ..openai.errors import ApiError, refused
from ..openai.generation import ClientGone
from ..service import Service
from ..tenants.quotas import RATE_HEADERS, Refusal
from .adapters import adapter_routes
from .administration import admin_routes
from .answer_count import AnswerCount, Answers
from .api_document import schemas
from .body_limit import BodyLimit
from .generating import generating_routes
from .json_answers import error_response
from .key_gate import KeyGate
from .keys import KeyCheck
from .last_answer import LastAnswer
from .memory_routes import memory_routes
from .native import native_routes
from .observing import observing_routes
from .refusal_log import AuditLog, RefusalLines, RefusalLog
from .sleep_routes import sleep_routes
from .trailing_slash import TrailingSlash
from .trl_routes import trl_routes
from .weight_routes import weight_routes

_FIELD = re.compile(r"[a-z][a-z0-9_]*")
_KIND = re.compile(r"(constrained-)?(str|int|float|bool)|list\[.*\]")

CLIENT_CLOSED_REQUEST = 499
"""nginx's status for an answer that nobody reads."""


def make_app(service: Service) -> tuple[FastAPI, KeyGate]:
    """Returns the ASGI application of a server, and what refuses requests without a key before it."""
    app = FastAPI(title="Ostinato", version=__version__, docs_url=None, redoc_url=None)
    app.router.redirect_slashes = False
    makers = (
        generating_routes,
        native_routes,
        admin_routes,
        adapter_routes,
        sleep_routes,
        memory_routes,
        weight_routes,
        trl_routes,
        observing_routes,
    )
    routers = [make(service) for make in makers]
    for routes in routers:
        app.include_router(routes)
    # The last one added is the first to see a request.
    config = service.config
    app.add_middleware(BodyLimit, max_bytes=config.max_body_bytes, seconds=config.client_timeout)
    app.add_middleware(KeyCheck, keys=service.keys, open_admin=config.open_admin)
    cors = None
    if config.allowed_origins:
        # Before the keys: a browser asks whether it may send one without sending it.
        make_cors = partial(
            CORSMiddleware,
            allow_origins=list(config.allowed_origins),
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=["X-Request-Id", "Retry-After", *RATE_HEADERS],
        )
        app.add_middleware(make_cors)
        cors = make_cors(app)
    counted, lines = Answers(service.metrics.answers, _paths(routers)), RefusalLines()
    app.add_middleware(AuditLog)
    app.add_middleware(RefusalLog, lines=lines)
    app.add_middleware(AnswerCount, answers=counted)
    app.add_middleware(TrailingSlash)
    app.add_middleware(LastAnswer)
    app.add_exception_handler(ApiError, _api_error)
    app.add_exception_handler(Refusal, _refusal)
    app.add_exception_handler(ClientGone, _client_gone)
    app.add_exception_handler(RequestValidationError, _validation_error)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(Exception, _unexpected)
    app.openapi = lambda: _document(app, service.model_name)  # type: ignore[method-assign]
    return app, KeyGate(service.keys, counted, lines, cors)


def _paths(routers: Sequence[APIRouter]) -> frozenset[str]:
    routes = (route for router in routers for route in router.routes)
    return frozenset(route.path for route in routes if isinstance(route, Route) and "{" not in route.path)


async def _api_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error_response(error)


async def _refusal(_: Request, error: Exception) -> Response:
    assert isinstance(error, Refusal)
    return error_response(refused(error))


async def _client_gone(_: Request, __: Exception) -> Response:
    return Response(status_code=CLIENT_CLOSED_REQUEST)


async def _validation_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    return error_response(_first_problem(error.errors()))


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = str(error.detail)
    if error.status_code == 404:
        message = f"there is no {request.url.path}"
    elif error.status_code == 405:
        message = f"{request.url.path} does not take {request.method}"
    code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code)
    return error_response(ApiError(error.status_code, message, code=code, headers=error.headers))


async def _unexpected(_: Request, error: Exception) -> Response:
    return error_response(ApiError(500, f"the server failed: {type(error).__name__}"))


def _first_problem(problems: Any) -> ApiError:
    """The problem that says most: an unknown field before a wrong value, and ours before the library's.

    Where a value may be of several kinds, it has a problem as each of them: as those that it is not at all,
    it has the wrong type, and it is most like the one in which something inside it is wrong.
    """
    order = {"extra_forbidden": 0, "value_error": 1}

    def rank(each: Any) -> tuple[int, int]:
        kind = each["type"]
        return order.get(kind, 3 if kind.endswith("_type") else 2), -len(each["loc"])

    problem = min(problems, key=rank)
    # The first is body or query. Among the names of fields are those of the kinds that a value was tried as,
    # such as list[Text].
    *around, last = [str(part) for part in problem["loc"][1:]] or [""]
    path = [part for part in around if part.isdigit() or _FIELD.fullmatch(part)]
    is_name = problem["type"] == "extra_forbidden" or not _KIND.fullmatch(last)
    path += [last] if last and is_name else []
    if problem["type"] == "json_invalid":
        return ApiError(400, f"the body is not JSON: {problem['ctx']['error']}", code="invalid_json")
    where = ".".join(path) or "the body"
    if problem["type"] == "extra_forbidden":
        why = REFUSALS.get(last, "there is no such field, or not in this server")
        named = where if last else "a field without a name"
        return ApiError(400, f"{named} is not supported: {why}", param=where, code="unsupported_field")
    said = problem["msg"].removeprefix("Value error, ")
    return ApiError(400, f"{where}: {said}", param=path[0] if path else None, code="invalid_value")


def _document(app: FastAPI, model_name: str) -> dict[str, Any]:
    from fastapi.openapi.utils import get_openapi

    if app.openapi_schema is None:
        document = get_openapi(title=app.title, version=app.version, routes=app.routes)
        components = document.setdefault("components", {}).setdefault("schemas", {})
        for name in ("HTTPValidationError", "ValidationError"):  # FastAPI's own shape, which is not ours
            components.pop(name, None)
        for path in document["paths"].values():
            for operation in path.values():
                operation["responses"].pop("422", None)
        for schema in components.values():
            if "model" in schema.get("properties", {}):
                schema["properties"]["model"]["anyOf"] = [{"const": model_name}, {"type": "null"}]
        components |= schemas()
        app.openapi_schema = document
    return app.openapi_schema
