"""The endpoints that generate: completions, chat, embeddings, and the tokenizer beside them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

from fastapi import APIRouter, Request
from starlette.responses import Response

from ..openai.chat import ChatWriter, answers_of
from ..openai.completion import Completion
from ..openai.completions import CompletionWriter, completions_of
from ..openai.embeddings import embed, embedding_prompts
from ..openai.errors import ApiError
from ..openai.generation import ClientGone, Generation
from ..openai.requests import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    EmbeddingRequest,
    Sampling,
    TokenizeRequest,
)
from ..openai.responses import (
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    EmbeddingBody,
    ModelCard,
    ModelList,
    TokenizeBody,
)
from ..openai.served_model import ServedModel
from ..service import Service
from .api_document import answers
from .client_watch import ClientWatch
from .event_stream import EventStream
from .json_answers import json_response

Result = TypeVar("Result")


def generating_routes(service: Service) -> APIRouter:
    """The routes of the OpenAI API and of the tokenizer."""
    routes = APIRouter()

    @routes.post("/v1/completions", responses=answers(CompletionBody, streams=True))
    async def completions(body: CompletionRequest, request: Request) -> Response:
        """Complete prompts."""
        model = service.serving(body.model)
        _check_generates(model)
        _check_stream_options(body)
        started = await completions_of(body, model, service.wakes_every(body), service.metrics.on_token)
        generation = service.generation("cmpl", started)
        return await _answer(body, request, generation, CompletionWriter(body, generation, model))

    @routes.post("/v1/chat/completions", responses=answers(ChatBody, streams=True))
    async def chat(body: ChatRequest, request: Request) -> Response:
        """Answer a conversation."""
        model = service.serving(body.model)
        _check_generates(model)
        _check_stream_options(body)
        started: list[Completion] = await answers_of(
            body, model, service.wakes_every(body), service.metrics.on_token
        )
        generation = service.generation("chatcmpl", started)
        writer = ChatWriter(body, generation, model, service.tool_call_kind)
        return await _answer(body, request, generation, writer)

    @routes.post("/v1/embeddings", responses=answers(EmbeddingBody))
    async def embeddings(body: EmbeddingRequest, request: Request) -> Response:
        """Turn texts into vectors of length 1."""
        model = service.serving(body.model)
        prompts = await embedding_prompts(body, model)
        service.admit(len(prompts))
        work = embed(prompts, body, service.engine, model)
        return json_response(await _while_client_waits(request, work, service.config.request_timeout))

    @routes.get("/v1/models", responses=answers(ModelList))
    async def models() -> Response:
        """The served model."""
        return json_response(ModelList([_card(service.serving())]))

    @routes.get("/v1/models/{name:path}", responses=answers(ModelCard))
    async def model(name: str) -> Response:
        """The served model, by name."""
        return json_response(_card(service.serving(name)))

    @routes.post("/tokenize", responses=answers(TokenizeBody))
    async def tokenize(body: TokenizeRequest) -> Response:
        """Token ids of a prompt or of a conversation."""
        model = service.serving(body.model)
        if (body.prompt is None) == (body.messages is None):
            raise ApiError(400, "give prompt or messages, one of them", param="prompt")
        if body.messages is not None:
            ids = await model.encode_chat(
                body.messages, body.tools, add_generation_prompt=body.add_generation_prompt
            )
        else:
            prompt = body.prompt or ""
            ids = await model.encode(prompt, "prompt", add_special_tokens=body.add_special_tokens)
        return json_response(TokenizeBody(len(ids), model.ready.max_model_len, ids))

    @routes.post("/detokenize", responses=answers(DetokenizeBody))
    async def detokenize(body: DetokenizeRequest) -> Response:
        """The text of token ids."""
        model = service.serving(body.model)
        tokenizer = model.need_tokenizer("tokens")
        text = tokenizer.decode(body.tokens, skip_special_tokens=body.skip_special_tokens)
        return json_response(DetokenizeBody(text))

    return routes


async def _answer(
    body: Sampling, request: Request, generation: Generation, writer: CompletionWriter | ChatWriter
) -> Response:
    """Wait for all of it; for a stream until there is something, so that a refusal still gets its status."""
    try:
        async with ClientWatch(request.receive, lambda: generation.end(ClientGone())):
            if body.stream:
                await generation.changed()
            else:
                await generation.finished()
        if body.stream:
            return EventStream(generation, writer.chunks)
        return json_response(writer.whole(), x_request_id=generation.id)
    except BaseException:
        generation.end()
        raise
    finally:
        if not body.stream:
            generation.end()


async def _while_client_waits(request: Request, work: Awaitable[Result], timeout: float) -> Result:
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


def _check_generates(model: ServedModel) -> None:
    if not model.ready.can_generate:
        name = model.ready.architecture
        raise ApiError(400, f"{name} has no output layer: it embeds only, use /v1/embeddings", param="model")


def _check_stream_options(body: Sampling) -> None:
    if body.stream_options is not None and not body.stream:
        raise ApiError(400, "stream_options needs stream to be true", param="stream_options")


def _card(model: ServedModel) -> ModelCard:
    return ModelCard(model.name, model.created, model.ready.max_model_len)
