"""Refuses requests without a valid key as soon as their headers are there, before the application sees them.

Who has no key can send thousands of them. In the application each would take a task, five middlewares and a
routed answer; here it takes the digest of its key and one write.
"""

from __future__ import annotations

from collections.abc import Iterable
from urllib.parse import unquote

import httptools
from starlette.datastructures import Headers, MutableHeaders
from starlette.middleware.cors import CORSMiddleware

from ..openai.errors import refused
from ..tenants.key_table import KeyTable
from ..tenants.quotas import Refusal
from .answer_count import Answers
from .json_answers import error_response
from .keys import bearer_key, scope_needed
from .refusal_log import RefusalLines, refusal_id
from .trailing_slash import without_slash

RawHeaders = list[tuple[bytes, bytes]]


class KeyGate:
    """Answers 401 as the application would: the same body, headers, count and line in the log."""

    def __init__(
        self, keys: KeyTable, answers: Answers, lines: RefusalLines, cors: CORSMiddleware | None
    ) -> None:
        """`cors`: which web pages may read answers; None: no foreign ones."""
        self._keys, self._answers, self._lines, self._cors = keys, answers, lines, cors
        self._prepared: dict[str, tuple[bytes, bytes]] = {}
        """Heads and bodies by their messages, of which there are a few."""

    def answer(
        self, method: str, url: bytes, headers: RawHeaders, default_headers: Iterable[tuple[bytes, bytes]]
    ) -> bytes | None:
        """Returns the whole 401 to a request; None: the application decides. `default_headers`: of every
        answer of the server."""
        given = next((value for name, value in headers if name == b"authorization"), b"")
        try:
            self._keys.key(bearer_key(given))
        except Refusal as refusal:
            reason = refusal
        else:
            return None
        try:
            path = without_slash(unquote(httptools.parse_url(url).path.decode("ascii")))
        except (httptools.HttpParserInvalidURLError, ValueError, AttributeError):
            return None
        if scope_needed(self._keys, path) is None or (
            self._cors is not None and _asks_first(method, headers)
        ):
            return None
        head, body = self._prepared.get(str(reason)) or self._prepare(reason)
        name = refusal_id()
        self._answers.count(path, reason.status)
        self._lines.say(name, method, path, reason.status, body)
        lines = [head, b"x-request-id: " + name.encode()]
        lines += [b"%b: %b" % each for each in (*default_headers, *self._for_pages(headers))]
        return b"\r\n".join((*lines, b"", b"" if method == "HEAD" else body))

    def _prepare(self, refusal: Refusal) -> tuple[bytes, bytes]:
        response = error_response(refused(refusal))
        lines = [b"HTTP/1.1 401 Unauthorized", b"connection: close"]
        lines += [b"%b: %b" % each for each in response.raw_headers]
        self._prepared[str(refusal)] = found = b"\r\n".join(lines), bytes(response.body)
        return found

    def _for_pages(self, given: RawHeaders) -> RawHeaders:
        """Returns the headers by which a web page of an allowed origin may read the answer."""
        cors = self._cors
        if cors is None:
            return []
        headers, origin = MutableHeaders(), Headers(raw=given).get("origin")
        if origin is not None:
            headers.update(cors.simple_headers)
        if origin is not None and not cors.allow_all_origins and cors.is_allowed_origin(origin):
            cors.allow_explicit_origin(headers, origin)
        else:
            headers["vary"] = "Origin"
        return headers.raw


def _asks_first(method: str, headers: RawHeaders) -> bool:
    """Whether a browser asks what it may send."""
    return method == "OPTIONS" and any(name == b"access-control-request-method" for name, _ in headers)
