"""Answers to requests that generate: whole or as a stream, while their client is there."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

from fastapi import Request
from starlette.responses import Response

from ..openai.errors import ApiError
from ..openai.generation import ClientGone, Generation
from ..openai.served_model import ServedModel
from ..openai.stream_events import Writer
from .client_watch import ClientWatch
from .event_stream import EventStream
from .json_answers import json_response
from .large_bodies import LARGE

Result = TypeVar("Result")


async def answer(streams: bool | None, request: Request, generation: Generation, writer: Writer) -> Response:
    """Wait for all of it; for a stream until there is something, so that a refusal still gets its status."""
    if not streams:
        await finished(request, generation)
        return json_response(writer.whole(), x_request_id=generation.id)
    try:
        async with ClientWatch(request.receive, lambda: generation.end(ClientGone())):
            await generation.changed()
        return EventStream(generation, writer)
    except BaseException:
        generation.end()
        raise


async def finished(request: Request, generation: Generation) -> None:
    """Wait for all of it, while its client is there."""
    try:
        async with ClientWatch(request.receive, lambda: generation.end(ClientGone())):
            await generation.finished()
    finally:
        generation.end()


async def while_client_waits(request: Request, work: Awaitable[Result], timeout: float) -> Result:
    """What `work` gives; it is cancelled if the client leaves or it takes too long."""
    task = asyncio.ensure_future(work)
    gone = False

    def leave() -> None:
        nonlocal gone
        gone = True
        task.cancel()

    try:
        async with ClientWatch(request.receive, leave):
            return await asyncio.wait_for(task, timeout)
    except TimeoutError:
        raise ApiError(504, f"the request took longer than {timeout:g} s", code="timeout") from None
    except asyncio.CancelledError:
        if gone:
            raise ClientGone from None
        raise


async def prepared(request: Request, work: Awaitable[Result], timeout: float) -> Result:
    """What `work` makes of a body; that of a large one ends with its client or when it takes too long."""
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and int(declared) <= LARGE:
        return await work
    return await while_client_waits(request, work, timeout)


def check_generates(model: ServedModel) -> None:
    """400 for a model that only embeds."""
    if not model.ready.can_generate:
        name = model.ready.architecture
        raise ApiError(400, f"{name} has no output layer: it embeds only, use /v1/embeddings", param="model")
