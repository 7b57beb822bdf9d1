"""The application: routes, middleware, and every error in OpenAI's shape."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from ostinato import __version__

from ..openai.errors import ApiError
from ..openai.generation import ClientGone
from ..service import Service
from .administration import admin_routes
from .answer_count import AnswerCount
from .api_document import schemas
from .body_limit import BodyLimit
from .generating import generating_routes
from .json_answers import error_response
from .keys import KeyCheck
from .observing import observing_routes

CLIENT_CLOSED_REQUEST = 499
"""nginx's status for an answer that nobody reads."""


def make_app(service: Service) -> FastAPI:
    """The ASGI application of a server."""
    app = FastAPI(title="Ostinato", version=__version__, docs_url=None, redoc_url=None)
    app.router.redirect_slashes = False
    for routes in (generating_routes(service), admin_routes(service), observing_routes(service)):
        app.include_router(routes)
    # The last one added is the first to see a request.
    app.add_middleware(BodyLimit, max_bytes=service.config.max_body_bytes)
    app.add_middleware(KeyCheck, config=service.config)
    app.add_middleware(AnswerCount, counts=service.metrics.answers, paths=_paths(app))
    app.add_exception_handler(ApiError, _api_error)
    app.add_exception_handler(ClientGone, _client_gone)
    app.add_exception_handler(RequestValidationError, _validation_error)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(Exception, _unexpected)
    app.openapi = lambda: _document(app, service.model_name)  # type: ignore[method-assign]
    return app


def _paths(app: FastAPI) -> frozenset[str]:
    return frozenset(path for route in app.routes if (path := getattr(route, "path", None)))


async def _api_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error_response(error)


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


_NOT_YET = {
    "parallel_tool_calls": "calls cannot be limited to one so far: only true is supported",
}


def _first_problem(problems: Any) -> ApiError:
    """The problem that says most: an unknown field before a wrong value."""
    problem = min(problems, key=lambda each: each["type"] != "extra_forbidden")
    path = [str(part) for part in problem["loc"] if part != "body"]
    if problem["type"] == "json_invalid":
        return ApiError(400, f"the body is not JSON: {problem['ctx']['error']}", code="invalid_json")
    field = path[0] if path else None
    if field in _NOT_YET:
        return ApiError(400, f"{field}: {_NOT_YET[field]}", param=field, code="unsupported_value")
    if problem["type"] == "extra_forbidden":
        where = ".".join(path)
        message = f"{where} is not supported: there is no such field, or not in this server"
        return ApiError(400, message, param=where, code="unsupported_field")
    where = ".".join(path) or "the body"
    return ApiError(400, f"{where}: {problem['msg']}", param=field, code="invalid_value")


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
