"""`/score` and `/rerank`: how well texts go together, as a model's head says of each pair; of a model without
one by the cosine of their vectors."""

from __future__ import annotations

import asyncio
import time
from secrets import token_hex
from typing import Annotated, Literal

import msgspec
from pydantic import Field

from ..engine_client.client import EngineClient
from ..wire.messages import JUDGED
from .body import Body, Text
from .embeddings import vectors_of
from .errors import ApiError
from .requests import MAX_INPUTS
from .responses import EmbeddingUsage
from .served_model import ServedModel

Texts = Text | Annotated[list[Text], Field(min_length=1, max_length=MAX_INPUTS)]


class Scoring(Body):
    """What both have."""

    model: str | None = None
    pooling: Literal["last", "mean"] | None = None
    truncate_prompt_tokens: Annotated[int, Field(ge=-1, le=2**31 - 1)] | None = None


class ScoreRequest(Scoring):
    """One text and others, or pairs, under one of the three pairs of names."""

    text_1: Texts | None = None
    text_2: Texts | None = None
    queries: Texts | None = None
    documents: Texts | None = None
    data_1: Texts | None = None
    data_2: Texts | None = None


class RerankRequest(Scoring):
    """A text, and others to put in the order of their nearness."""

    query: Text
    documents: Annotated[list[Text], Field(min_length=1, max_length=MAX_INPUTS)]
    top_n: Annotated[int, Field(ge=0)] | None = None
    """How many of the nearest are wanted; 0: all."""
    return_documents: bool | None = None


class Score(msgspec.Struct, frozen=True):
    """How near the texts of a pair are, -1 to 1, or what a head says of them."""

    index: int
    score: float
    object: Literal["score"] = "score"


class ScoreBody(msgspec.Struct, frozen=True):
    """The answer of `/score`."""

    id: str
    created: int
    model: str
    data: list[Score]
    usage: EmbeddingUsage
    object: Literal["list"] = "list"


class RankedDocument(msgspec.Struct, frozen=True):
    """A text."""

    text: str


class Rank(msgspec.Struct, frozen=True, omit_defaults=True):
    """A document and how near it is."""

    index: int
    relevance_score: float
    document: RankedDocument | None = None


class RerankBody(msgspec.Struct, frozen=True):
    """The answer of `/rerank`, nearest first."""

    id: str
    model: str
    usage: EmbeddingUsage
    results: list[Rank]


async def score(body: ScoreRequest, engine: EngineClient, model: ServedModel) -> ScoreBody:
    """The nearness of all pairs."""
    first, second = pairs_of(body)
    scores, usage = await _nearness(first, second, body, engine, model)
    data = [Score(index, value) for index, value in enumerate(scores)]
    return ScoreBody(f"score-{token_hex(16)}", int(time.time()), model.name, data, usage)


async def rerank(body: RerankRequest, engine: EngineClient, model: ServedModel) -> RerankBody:
    """The documents, nearest first; those equally near in their own order."""
    scores, usage = await _nearness([body.query], body.documents, body, engine, model)
    shows = body.return_documents is not False
    results = [
        Rank(index, value, RankedDocument(body.documents[index]) if shows else None)
        for value, index in sorted(zip(scores, range(len(scores)), strict=True), key=lambda each: -each[0])
    ]
    return RerankBody(f"rerank-{token_hex(16)}", model.name, usage, results[: body.top_n or None])


def pairs_of(body: ScoreRequest) -> tuple[list[str], list[str]]:
    """The first texts of all pairs and the second ones; one first text goes with all second ones."""
    named = (
        ("text_1", body.text_1, body.text_2),
        ("queries", body.queries, body.documents),
        ("data_1", body.data_1, body.data_2),
    )
    given = [each for each in named if each[1] is not None or each[2] is not None]
    name, one, other = given[0] if len(given) == 1 else ("text_1", None, None)
    if one is None or other is None:
        raise ApiError(400, "give text_1 and text_2, or queries and documents", param=name)
    first, second = _listed(one), _listed(other)
    if len(first) not in (1, len(second)):
        message = f"{name}: {len(first)} texts cannot be paired with {len(second)}"
        raise ApiError(400, message, param=name)
    return first, second


def _listed(given: str | list[str]) -> list[str]:
    return [given] if isinstance(given, str) else given


async def _nearness(
    first: list[str], second: list[str], body: Scoring, engine: EngineClient, model: ServedModel
) -> tuple[list[float], EmbeddingUsage]:
    """One to all, or pair by pair."""
    if model.ready.num_labels:
        return await _judged(first, second, body, engine, model)
    prompts = [await _prompt(text, None, body, model) for text in (*first, *second)]
    vectors = await vectors_of(prompts, body.pooling or model.ready.pooling, engine, model)
    ones, others = vectors[: len(first)], vectors[len(first) :]
    ones = ones * len(others) if len(ones) == 1 else ones
    return [float(one @ other) for one, other in zip(ones, others, strict=True)], _usage(prompts)


async def _judged(
    first: list[str], second: list[str], body: Scoring, engine: EngineClient, model: ServedModel
) -> tuple[list[float], EmbeddingUsage]:
    if model.ready.num_labels != 1:
        message = f"scores need a model with one label, and {model.name!r} has {model.ready.num_labels}"
        raise ApiError(400, message, param="model")
    if body.pooling is not None:
        raise ApiError(400, "pooling: this model's head judges pairs, by their last token", param="pooling")
    ones = first * len(second) if len(first) == 1 else first
    prompts = [await _prompt(one, other, body, model) for one, other in zip(ones, second, strict=True)]
    found = await vectors_of(prompts, JUDGED, engine, model)
    return [float(score[0]) for score in found], _usage(prompts)


async def _prompt(text: str, other: str | None, body: Scoring, model: ServedModel) -> list[int]:
    await asyncio.sleep(0)  # there may be thousands
    is_whole = body.truncate_prompt_tokens is None
    ids = await model.encode(text, "text", is_prompt=is_whole, answer=0, other=other)
    return model.checked_prompt(model.cut(ids, body.truncate_prompt_tokens, 0), "text", 0)


def _usage(prompts: list[list[int]]) -> EmbeddingUsage:
    tokens = sum(map(len, prompts))
    return EmbeddingUsage(tokens, tokens)
