"""The endpoints that generate: completions, chat, embeddings, and the tokenizer beside them."""

from __future__ import annotations

import asyncio
from functools import partial

from fastapi import APIRouter, Request
from msgspec import structs
from starlette.responses import Response

from ..openai.chat import ChatWriter, answers_of, call_parser
from ..openai.completions import CompletionWriter, completions_of
from ..openai.embeddings import embed, embedding_prompts
from ..openai.errors import ApiError
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
from ..openai.responses_api.as_chat import as_chat, renamed
from ..openai.responses_api.requests import ResponsesRequest
from ..openai.responses_api.writer import ResponseWriter
from ..openai.sampling import check_known
from ..openai.scoring import RerankBody, RerankRequest, ScoreBody, ScoreRequest, pairs_of, rerank, score
from ..openai.served_model import ServedModel
from ..openai.tokenizing import token_ids_of
from ..openai.tool_use import tool_use
from ..service import Service
from ..text_work.lanes import INLINE
from .answering import answer, check_generates, prepared, while_client_waits
from .api_document import answers
from .json_answers import json_response


def generating_routes(service: Service) -> APIRouter:
    """The routes of the OpenAI API and of the tokenizer."""
    routes = APIRouter()

    @routes.post("/v1/completions", responses=answers(CompletionBody, streams=True))
    async def completions(body: CompletionRequest, request: Request) -> Response:
        """Complete prompts."""
        model = service.serving(body.model)
        check_generates(model)
        _check_stream_options(body)
        work = completions_of(body, model, service.wakes_every(body.stream), service.metrics.on_token)
        started = await prepared(request, work, service.config.request_timeout)
        generation = service.generation(_id(service, "cmpl", body, request), started)
        return await answer(body.stream, request, generation, CompletionWriter(body, generation, model))

    @routes.post("/v1/chat/completions", responses=answers(ChatBody, streams=True))
    async def chat(body: ChatRequest, request: Request) -> Response:
        """Answer a conversation."""
        model = service.serving(body.model)
        check_generates(model)
        _check_stream_options(body)
        use = tool_use(body)
        work = answers_of(body, model, use, service.wakes_every(body.stream), service.metrics.on_token)
        started = await prepared(request, work, service.config.request_timeout)
        generation = service.generation(_id(service, "chatcmpl", body, request), started)
        writer = ChatWriter(body, generation, model, use)
        return await answer(body.stream, request, generation, writer)

    @routes.post("/v1/responses", responses=answers(streams=True))
    async def responses(body: ResponsesRequest, request: Request) -> Response:
        """Answer items with items."""
        model = service.serving(body.model)
        check_generates(model)
        _check_stream_options(body)
        try:
            chat = as_chat(body)
            use = tool_use(chat)
            wakes_every = service.wakes_every(body.stream)
            work = answers_of(chat, model, use, wakes_every, service.metrics.on_token)
            started = await prepared(request, work, service.config.request_timeout)
            generation = service.generation(_id(service, "resp", body, request), started)
            parser = call_parser(use, model.tool_call_kind)
            return await answer(
                body.stream, request, generation, ResponseWriter(body, chat, generation, model, parser)
            )
        except ApiError as error:
            raise renamed(error) from None

    @routes.api_route("/v1/responses/{id}", methods=["GET", "DELETE"], include_in_schema=False)
    @routes.post("/v1/responses/{id}/cancel", include_in_schema=False)
    @routes.get("/v1/responses/{id}/input_items", include_in_schema=False)
    async def stored_response(id: str) -> Response:
        """There are none: responses are not stored."""
        message = f"there is no response {id[:64]!r}: responses are not stored here, whatever store says"
        raise ApiError(404, message, param="id", code="not_stored")

    @routes.post("/v1/embeddings", responses=answers(EmbeddingBody))
    async def embeddings(body: EmbeddingRequest, request: Request) -> Response:
        """Turn texts into vectors of length 1."""
        model = service.serving(body.model)
        timeout = service.config.request_timeout
        prompts = await prepared(request, embedding_prompts(body, model), timeout)
        service.admit(len(prompts))
        work = embed(prompts, body, service.engine, model)
        return json_response(await while_client_waits(request, work, timeout))

    @routes.post("/v1/score", include_in_schema=False)
    @routes.post("/score", responses=answers(ScoreBody))
    async def score_pairs(body: ScoreRequest, request: Request) -> Response:
        """Say how near texts are to each other."""
        model = service.serving(body.model)
        service.admit(sum(map(len, pairs_of(body))))
        work = score(body, service.engine, model)
        return json_response(await while_client_waits(request, work, service.config.request_timeout))

    @routes.post("/v1/rerank", include_in_schema=False)
    @routes.post("/v2/rerank", include_in_schema=False)
    @routes.post("/rerank", responses=answers(RerankBody))
    async def rerank_documents(body: RerankRequest, request: Request) -> Response:
        """Put texts in the order of their nearness to another."""
        model = service.serving(body.model)
        service.admit(len(body.documents) + 1)
        work = rerank(body, service.engine, model)
        return json_response(await while_client_waits(request, work, service.config.request_timeout))

    @routes.get("/v1/models", responses=answers(ModelList))
    async def models() -> Response:
        """The served model and its adapters."""
        model = service.serving()
        adapters = [_card(model.named(name)) for name in model.adapters]
        return json_response(ModelList([_card(model), *adapters]))

    @routes.get("/v1/models/{name:path}", responses=answers(ModelCard))
    async def model(name: str) -> Response:
        """The served model, by name."""
        return json_response(_card(service.serving(name)))

    @routes.post("/tokenize", responses=answers(TokenizeBody))
    async def tokenize(body: TokenizeRequest, request: Request) -> Response:
        """Token ids of a prompt or of a conversation."""
        model = service.serving(body.model)
        ids = await prepared(request, token_ids_of(body, model), service.config.request_timeout)
        found = TokenizeBody(len(ids), model.ready.max_model_len, ids)
        if body.return_token_strs:
            known = model.need_tokenizer("return_token_strs").backend.id_to_token
            found = structs.replace(found, token_strs=[known(token) for token in ids])
        return json_response(found)

    @routes.post("/detokenize", responses=answers(DetokenizeBody))
    async def detokenize(body: DetokenizeRequest) -> Response:
        """The text of token ids."""
        model = service.serving(body.model)
        tokenizer = model.need_tokenizer("tokens")
        # Either may know more than the other: a vocabulary is padded, words are added.
        check_known("tokens", body.tokens, max(model.ready.vocab_size, tokenizer.vocab_size))
        decode = partial(tokenizer.decode, body.tokens, skip_special_tokens=body.skip_special_tokens)
        text = decode() if len(body.tokens) <= INLINE else await asyncio.to_thread(decode)
        return json_response(DetokenizeBody(text))

    return routes


def _id(service: Service, kind: str, body: Sampling, request: Request) -> str:
    return service.answer_id(kind, body, request.headers.get("x-request-id"))


def _check_stream_options(body: Sampling) -> None:
    if body.stream_options is not None and not body.stream:
        raise ApiError(400, "stream_options needs stream to be true", param="stream_options")


def _card(model: ServedModel) -> ModelCard:
    ready = model.ready
    card = ModelCard(model.name, model.created, ready.max_model_len, root=ready.directory)
    if model.adapter is None:
        return card
    return structs.replace(card, root=model.adapters[model.adapter].path, parent=model.base_name)
