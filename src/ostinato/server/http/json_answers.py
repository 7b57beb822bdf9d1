"""Answers with JSON bodies."""

from __future__ import annotations

import msgspec
from starlette.responses import Response

from ..openai.errors import ApiError


def json_response(body: msgspec.Struct | bytes | dict[str, object], **headers: str) -> Response:
    """200 with this body; underscores in header names stand for dashes."""
    content = body if isinstance(body, bytes) else msgspec.json.encode(body)
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return Response(content, media_type="application/json", headers=named)


def error_response(error: ApiError) -> Response:
    """The error in OpenAI's shape."""
    return Response(error.body, error.status, headers=error.headers, media_type="application/json")
