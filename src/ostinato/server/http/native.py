"""The endpoints that only SGLang has: generation in its own words, and what it says about itself."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from ostinato import __version__

from ..openai.requests import Sampling
from ..service import Service
from ..sglang.generate import GenerateWriter, generations_of
from ..sglang.requests import GenerateRequest
from .answering import answer, check_generates, prepared
from .api_document import ONE_OR_SEVERAL, answers
from .json_answers import json_response


def native_routes(service: Service) -> APIRouter:
    """The routes of SGLang's own API."""
    routes = APIRouter()

    @routes.put("/generate", include_in_schema=False)
    @routes.post("/generate", responses=answers(ONE_OR_SEVERAL, streams=True))
    async def generate(body: GenerateRequest, request: Request) -> Response:
        """Go on with prompts."""
        model = service.serving()
        check_generates(model)
        wakes_every = service.wakes_every(body.stream)
        work = generations_of(body, model, wakes_every, service.metrics.on_token)
        started = await prepared(request, work, service.config.request_timeout)
        id = service.answer_id("gen", Sampling(rid=body.rid), request.headers.get("x-request-id"))
        generation = service.generation(id, started)
        writer = GenerateWriter(body, generation, model)
        return await answer(body.stream, request, generation, writer)

    @routes.get("/get_model_info", include_in_schema=False)
    @routes.get("/model_info", responses=answers())
    async def model_info() -> Response:
        """The served model."""
        model = service.serving()
        found: dict[str, Any] = {
            "model_path": model.ready.directory,
            "served_model_name": model.name,
            "tokenizer_path": model.ready.tokenizer_directory if model.tokenizer is not None else None,
            "is_generation": model.ready.can_generate,
            "preferred_sampling_params": None,
            "weight_version": service.engine.standing.weight_version,
            "has_image_understanding": False,
            "has_audio_understanding": False,
            "tool_call_parser": model.tool_call_kind,
            "architectures": [model.ready.architecture],
        }
        return json_response(found)

    @routes.get("/get_server_info", include_in_schema=False)
    @routes.get("/server_info", responses=answers())
    async def server_info() -> Response:
        """What the server was started with, as far as it is nobody's secret, and how it is."""
        model, config = service.serving(), service.config
        statistics = service.engine.statistics
        state = {} if statistics is None else {"running": statistics.running, "waiting": statistics.waiting}
        found: dict[str, Any] = {
            "version": __version__,
            "model_path": model.ready.directory,
            "served_model_name": model.name,
            "host": config.host,
            "port": config.port,
            "context_length": model.ready.max_model_len,
            "max_running_requests": model.ready.max_running,
            "max_queued_requests": config.max_queued_requests,
            "stream_interval": config.stream_interval,
            "tool_call_parser": model.tool_call_kind,
            "enable_memory_saver": model.ready.can_sleep,
            "weight_version": service.engine.standing.weight_version,
            "tp_size": 1,
            "dp_size": 1,
            "internal_states": [state],
            "vllm_config": model.ready.vllm_config,
        }
        return json_response(found)

    @routes.get("/get_load", include_in_schema=False)
    @routes.get("/v1/loads", responses=answers())
    async def loads() -> Response:
        """How many requests are here, by rank: there is one."""
        service.serving()
        statistics, total = service.engine.statistics, service.engine.num_unfinished
        running = 0 if statistics is None else min(statistics.running, total)
        load = {"dp_rank": 0, "num_running_reqs": running, "num_waiting_reqs": total - running}
        return json_response({"loads": [{**load, "num_reqs": total, "num_total_reqs": total}]})

    return routes
