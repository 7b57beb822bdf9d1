"""Responses in the OpenAPI document, from the very types that are sent."""

from __future__ import annotations

from typing import Any

import msgspec

from ..openai.errors import ErrorBody
from ..openai.responses import (
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    EmbeddingBody,
    ModelCard,
    ModelList,
    TokenizeBody,
)
from ..openai.scoring import RerankBody, ScoreBody
from ..trl.rollouts import RolloutBody

_TYPES = (
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    EmbeddingBody,
    ErrorBody,
    ModelCard,
    ModelList,
    RerankBody,
    RolloutBody,
    ScoreBody,
    TokenizeBody,
)
_REFERENCE = "#/components/schemas/{name}"
_ERRORS = {
    400: "The request is wrong; `param` names the field.",
    401: "A key is missing or wrong.",
    403: "For admins only.",
    404: "There is no such thing.",
    408: "The body took too long to arrive.",
    409: "The engine sleeps.",
    413: "The body is too large.",
    415: "The body is not declared as JSON.",
    429: "The queue is full; Retry-After says when to come back.",
    500: "The server failed.",
    503: "The server is loading, stopping or dead.",
    504: "The request took too long.",
}


def schemas() -> dict[str, Any]:
    """The components that `answers` refers to."""
    _, components = msgspec.json.schema_components(_TYPES, ref_template=_REFERENCE)
    return dict(components)


ONE_OR_SEVERAL: dict[str, Any] = {"oneOf": [{"type": "object"}, {"type": "array"}]}
"""An object for one thing that was asked for, a list for a list."""
ROWS: dict[str, Any] = {"type": "array"}


def answers(
    success: type | dict[str, Any] | None = None, *, streams: bool = False
) -> dict[int | str, dict[str, Any]]:
    """The `responses` of a route: its success, by its type or its schema, and every error."""
    content: dict[str, Any] = {"application/json": {"schema": _schema(success)}}
    if streams:
        content["text/event-stream"] = {"schema": {"type": "string"}}
    error = {"application/json": {"schema": _schema(ErrorBody)}}
    described: dict[int | str, dict[str, Any]] = {200: {"description": "Success.", "content": content}}
    described |= {status: {"description": text, "content": error} for status, text in _ERRORS.items()}
    return described


def _schema(kind: type | dict[str, Any] | None) -> dict[str, Any]:
    if isinstance(kind, dict):
        return kind
    return {"type": "object"} if kind is None else {"$ref": _REFERENCE.format(name=kind.__name__)}
