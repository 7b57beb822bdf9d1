"""Errors as the OpenAI API words them: a status, and {"error": {message, type, param, code}}."""

from __future__ import annotations

import re
from collections.abc import Mapping

import msgspec

from ..tenants.quotas import Refusal

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    409: "conflict_error",
    413: "invalid_request_error",
    415: "invalid_request_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
    504: "timeout_error",
}


class ErrorDetail(msgspec.Struct, frozen=True):
    """What went wrong."""

    message: str
    type: str
    param: str | None
    """The field at fault, where one is."""
    code: str | None


class ErrorBody(msgspec.Struct, frozen=True):
    """The body of every answer that is not a success."""

    error: ErrorDetail


class ApiError(Exception):
    """Answers a request with an error."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code
        self.headers = dict(headers or {})

    @property
    def body(self) -> bytes:
        """The answer's JSON."""
        kind = _TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        param = None if self.param is None else _printable(self.param)
        return msgspec.json.encode(ErrorBody(ErrorDetail(_printable(str(self)), kind, param, self.code)))


def _printable(text: str) -> str:
    """Messages quote what clients sent, and JSON lets them send half a surrogate pair."""
    return text.encode(errors="backslashreplace").decode()


_PLACE = re.compile(r"(\[\d\d:\d\d:\d\d\] )?\S*\.(cc|cpp|cxx|c|h|hpp|cu|cuh|rs|py):\d+(:\d+)?:? ?")


def without_places(text: str) -> str:
    """What a library says, without where in its source it says so; of many lines the first."""
    lines = [line.strip() for line in _PLACE.sub("", text).splitlines()]
    return next((line for line in lines if line), "no reason was given")


def engine_error(message: str, *, refused: bool, param: str | None = None) -> ApiError:
    """Of a request that the engine ended: the request's own fault, or the engine's, which may pass."""
    told = without_places(message)
    return ApiError(400, told, param=param) if refused else unavailable(told)


def refused(refusal: Refusal) -> ApiError:
    """What a tenant may not ask for, as an answer."""
    return ApiError(refusal.status, str(refusal), code=refusal.code, headers=refusal.headers)


def unavailable(message: str, retry_after: int = 5) -> ApiError:
    """The server cannot serve now, and may soon."""
    return ApiError(503, message, code="unavailable", headers={"Retry-After": str(retry_after)})
