"""`/v1/embeddings`: texts in, vectors out."""

from __future__ import annotations

import asyncio
import base64
from typing import Any, cast

import msgspec
import numpy as np

from ..engine_client.client import EngineClient, EngineGone
from ..tenants.tenant import current_tenant, salted
from ..wire.messages import News
from .errors import ApiError, engine_error, unavailable
from .requests import EmbeddingRequest
from .responses import EmbeddingBody, EmbeddingItem, EmbeddingUsage
from .served_model import ServedModel

Vector = np.ndarray[Any, np.dtype[np.float32]]


class _Vector:
    """Listens to one engine request."""

    def __init__(self, model: ServedModel) -> None:
        self._model = model
        self.result: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

    def take_token(self, token: int) -> None:
        raise AssertionError(f"an embedding got token {token}")

    def take_in(self, news: News) -> None:
        if self.result.done() or news.finish_reason is None:
            return
        if news.embedding is not None:
            self.result.set_result(news.embedding)
        else:
            self.result.set_exception(self._error_of(news))

    def _error_of(self, news: News) -> ApiError:
        if news.lacks_adapter:
            return self._model.without_its_adapter()
        return engine_error(news.error or "the request was aborted", refused=news.refused)

    def fail(self, error: EngineGone) -> None:
        if not self.result.done():
            self.result.set_exception(unavailable(str(error)))


async def embedding_prompts(body: EmbeddingRequest, model: ServedModel) -> list[list[int]]:
    """Token ids of every input."""
    given = body.input
    listed: list[Any] = given if isinstance(given, list) and not isinstance(given[0], int) else [given]
    prompts = []
    is_whole = body.truncate_prompt_tokens is None
    special = body.add_special_tokens is not False
    for entry in listed:
        ids = (
            await model.encode(entry, "input", add_special_tokens=special, is_prompt=is_whole, answer=0)
            if isinstance(entry, str)
            else entry
        )
        ids = model.cut(ids, body.truncate_prompt_tokens, 0)
        prompts.append(model.checked_prompt(ids, "input", 0))
        await asyncio.sleep(0)  # there may be thousands
    return prompts


async def embed(
    prompts: list[list[int]], body: EmbeddingRequest, engine: EngineClient, model: ServedModel
) -> EmbeddingBody:
    """The answer to `body`. Cancelling it aborts what is unfinished."""
    size = model.ready.hidden_size
    if body.dimensions is not None and body.dimensions > size:
        message = f"dimensions: the vectors of this model have {size} numbers, not {body.dimensions}"
        raise ApiError(400, message, param="dimensions")
    vectors = await vectors_of(prompts, body.pooling or model.ready.pooling, engine, model)
    tokens = sum(map(len, prompts))
    written = _as_base64 if body.encoding_format == "base64" else _as_numbers
    data = []
    for index, vector in enumerate(vectors):
        item = EmbeddingItem(index, written(_shortened(vector, body.dimensions)))
        data.append(msgspec.Raw(msgspec.json.encode(item)))
        await asyncio.sleep(0)  # millions of numbers take seconds to write, and others have streams to be fed
    return EmbeddingBody(model.name, cast(list[EmbeddingItem], data), EmbeddingUsage(tokens, tokens))


async def vectors_of(
    prompts: list[list[int]], pooling: str, engine: EngineClient, model: ServedModel
) -> list[Vector]:
    """The vectors of all prompts, each of length 1. Cancelling it aborts what is unfinished."""
    tenant = current_tenant.get()
    tenant.take_prompt(sum(map(len, prompts)), 0)
    listeners = [_Vector(model) for _ in prompts]
    ids: list[int] = []
    try:
        for prompt, listener in zip(prompts, listeners, strict=True):
            ids.append(engine.embed(prompt, pooling, listener, model.adapter, salted(None), tenant))
        return [np.frombuffer(await listener.result, dtype="<f4") for listener in listeners]
    except EngineGone as error:
        raise unavailable(str(error)) from error
    finally:
        engine.forget(ids)
        for listener in listeners:
            if not listener.result.done():
                listener.result.cancel()
            elif not listener.result.cancelled():
                listener.result.exception()  # the first error is told for all of them


def _shortened(vector: Vector, dimensions: int | None) -> Vector:
    """The first numbers, at length 1 again; a vector of zeros stays one."""
    if dimensions is None:
        return vector
    kept = vector[:dimensions].astype(np.float64)
    length = float(np.linalg.norm(kept))
    return (kept / length if length else kept).astype("<f4")


def _as_base64(vector: Vector) -> str:
    return base64.b64encode(vector.tobytes()).decode()


def _as_numbers(vector: Vector) -> list[float]:
    numbers: list[float] = vector.tolist()
    return numbers
