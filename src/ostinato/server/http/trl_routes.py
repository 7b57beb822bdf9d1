"""The endpoints of `trl vllm-serve`. Those without a way of their own are vLLM's: /health, /get_world_size.

TRL writes all of them with a slash at the end; two of them are others' without it (`trailing_slash`).
"""

from __future__ import annotations

import asyncio
import functools

from fastapi import APIRouter, Request
from starlette.responses import Response

from ..openai.completion import Completion
from ..openai.generation import Generation
from ..service import Service
from ..trl.requests import (
    ChatRequest,
    CommunicatorRequest,
    GenerateRequest,
    ParameterRequest,
    SequenceLogprobsRequest,
)
from ..trl.rollouts import RolloutBody, Rollouts
from ..trl.sequence_logprobs import scored_sequences, told
from ..trl.trainer_line import TrainerLine
from .answering import check_generates, finished, prepared
from .api_document import answers
from .engine_calls import engine_call
from .json_answers import json_response


def trl_routes(service: Service) -> APIRouter:
    """The routes."""
    routes = APIRouter()
    line = TrainerLine(service.engine, functools.partial(engine_call, service))
    _add_rollouts(routes, service, line)
    _add_weights(routes, service, line)
    return routes


def _add_rollouts(routes: APIRouter, service: Service, line: TrainerLine) -> None:
    async def rollouts(body: GenerateRequest | ChatRequest, request: Request) -> Response:
        model = service.serving()
        check_generates(model)
        work = Rollouts.of(body, model, service.metrics.on_token)
        found = await prepared(request, work, service.config.request_timeout)
        async with line.generating():
            generation = await completed(found.completions, request)
        return json_response(found.told(), x_request_id=generation.id)

    async def completed(completions: list[Completion], request: Request) -> Generation:
        id = service.answer_id("trl", header=request.headers.get("x-request-id"))
        generation = service.generation(id, completions)
        await finished(request, generation)
        return generation

    @routes.post("/generate/", responses=answers(RolloutBody))
    async def generate(body: GenerateRequest, request: Request) -> Response:
        """Go on with prompts."""
        return await rollouts(body, request)

    @routes.post("/chat", responses=answers(RolloutBody))
    async def chat(body: ChatRequest, request: Request) -> Response:
        """Answer conversations."""
        return await rollouts(body, request)

    @routes.post("/get_sequence_logprobs", responses=answers())
    async def get_sequence_logprobs(body: SequenceLogprobsRequest, request: Request) -> Response:
        """Log probabilities of sequences that are there already."""
        model = service.serving()
        check_generates(model)
        work = scored_sequences(body, model, service.metrics.on_token)
        completions = await prepared(request, work, service.config.request_timeout)
        async with line.generating():
            generation = await completed(completions, request)
        written = await asyncio.to_thread(told, body, completions)
        return json_response(written, x_request_id=generation.id)


def _add_weights(routes: APIRouter, service: Service, line: TrainerLine) -> None:
    # Not in the document, as others that wait for a trainer.
    @routes.post("/init_communicator", include_in_schema=False)
    async def init_communicator(body: CommunicatorRequest) -> Response:
        """Listen for the trainer, which comes when this is answered."""
        await line.open(
            address=body.host,
            port=body.port,
            world_size=body.world_size,
            device_uuid=body.client_device_uuid,
        )
        return json_response({"message": "Request received, initializing communicator"})

    @routes.post("/update_named_param", include_in_schema=False)
    async def update_named_param(body: ParameterRequest) -> Response:
        """Take a weight, which the trainer broadcasts when this is answered."""
        await line.take(weight=body.name, dtype=body.dtype, shape=body.shape)
        return json_response({"message": "Request received, updating named parameter"})

    @routes.post("/close_communicator", include_in_schema=False)
    async def close_communicator() -> Response:
        """Leave the trainer."""
        await line.close()
        return json_response({"message": "Request received, closing communicator"})

    @routes.post("/reset_prefix_cache/", responses=answers())
    async def reset_prefix_cache() -> Response:
        """Forget all cached prefixes, when all weights that were promised are here."""
        await line.kept()
        await engine_call(service, "reset_prefix_cache", running=False)
        return json_response({"message": "Request received, resetting prefix cache status: True"})
