"""Endpoints for trainers: new weights from their processes, in the words of SGLang and of vLLM.

Who may call them is decided in `keys`. Who gives no weights that fit is told so, and nothing has changed.
"""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
from fastapi import APIRouter
from starlette.responses import Response

from ..openai.errors import ApiError
from ..service import Service
from .api_document import ROWS, answers
from .engine_calls import engine_call
from .json_answers import json_response
from .known_query import admin_router
from .weight_bodies import (
    BufferUpdate,
    DiskUpdate,
    GroupEnd,
    GroupMeeting,
    GroupUpdate,
    TensorsUpdate,
    TransferEnd,
    TransferInit,
    TransferPart,
    TransferStart,
    VersionUpdate,
    WeightAsked,
    WeightsCheck,
    WorkerCall,
)

_DISK_FORMATS = (None, "auto", "safetensors")


def weight_routes(service: Service) -> APIRouter:
    """All of them."""
    routes = admin_router()
    _add_sglang(routes, service)
    _add_vllm(routes, service)
    return routes


def _add_sglang(routes: APIRouter, service: Service) -> None:
    async def update(name: str, aborts: bool | None, **payload: Any) -> Response:
        if aborts:
            _abort_all(service)
        return await _with_success(engine_call(service, name, **payload), "Success")

    @routes.post("/update_weights_from_disk", responses=answers())
    async def update_weights_from_disk(body: DiskUpdate) -> Response:
        """Weights of a checkpoint's directory."""
        if body.load_format not in _DISK_FORMATS:
            raise ApiError(400, f"load_format can be auto, not {body.load_format!r}", param="load_format")
        return await update(
            "weights_from_disk", body.abort_all_requests, path=body.model_path, version=body.weight_version
        )

    @routes.post("/update_weights_from_tensor", responses=answers())
    async def update_weights_from_tensor(body: TensorsUpdate) -> Response:
        """Weights in memory that the client's process shares."""
        return await update(
            "weights_from_tensors",
            body.abort_all_requests,
            payloads=body.serialized_named_tensors,
            load_format=body.load_format,
            version=body.weight_version,
        )

    @routes.post("/update_weights_from_ipc", include_in_schema=False)
    async def update_weights_from_ipc(body: BufferUpdate) -> Response:
        """Weights that checkpoint-engine puts into a buffer of its own."""
        return await update(
            "weights_through_buffer",
            body.abort_all_requests,
            handles=body.zmq_handles,
            version=body.weight_version,
        )

    @routes.post("/update_weights_from_distributed", responses=answers())
    async def update_weights_from_distributed(body: GroupUpdate) -> Response:
        """Weights that the client broadcasts."""
        return await update(
            "weights_from_group",
            body.abort_all_requests,
            group_name=body.group_name,
            names=body.names,
            dtypes=body.dtypes,
            shapes=body.shapes,
            load_format=body.load_format,
            version=body.weight_version,
        )

    # Not in the document: whoever tries it out by generated requests waits for trainers that do not exist.
    @routes.post("/init_weights_update_group", include_in_schema=False)
    async def init_weights_update_group(body: GroupMeeting) -> Response:
        """Meet the client in a process group."""
        call = engine_call(
            service,
            "join_group",
            group_name=body.group_name,
            address=body.master_address,
            port=body.master_port,
            rank_offset=body.rank_offset,
            world_size=body.world_size,
            backend=body.backend,
        )
        return await _with_success(call, "Succeeded to initialize custom process group.")

    @routes.post("/destroy_weights_update_group", responses=answers())
    async def destroy_weights_update_group(body: GroupEnd) -> Response:
        """Leave a process group."""
        call = engine_call(service, "leave_group", group_name=body.group_name)
        return await _with_success(call, "Succeeded to destroy custom process group.")

    @routes.post("/update_weight_version", responses=answers())
    async def update_weight_version(body: VersionUpdate) -> Response:
        """Call the weights something else."""
        if body.abort_all_requests:
            _abort_all(service)
        await engine_call(service, "rename_weights", version=body.new_version)
        message = f"Weight version updated to {body.new_version}"
        return json_response({"success": True, "message": message, "new_version": body.new_version})

    @routes.get("/weight_version", include_in_schema=False)
    @routes.get("/weight_info", include_in_schema=False)
    @routes.get("/get_weight_version", responses=answers())
    async def get_weight_version() -> Response:
        """What the weights are called."""
        found = await engine_call(service, "weight_version")
        return json_response({"weight_version": found["version"]})

    @routes.get("/get_weights_by_name", include_in_schema=False)
    @routes.post("/get_weights_by_name", responses=answers(ROWS))
    async def get_weights_by_name(body: WeightAsked) -> Response:
        """The first rows of a weight."""
        found = await engine_call(service, "weights_by_name", weight=body.name, count=body.truncate_size)
        return json_response(msgspec.json.encode(found))

    @routes.get("/weights_checker", include_in_schema=False)
    @routes.post("/weights_checker", responses=answers())
    async def weights_checker(body: WeightsCheck | None = None) -> Response:
        """Sums over all weights, or a comparison with an earlier state."""
        action = (body or WeightsCheck()).action
        found = await engine_call(service, "check_weights", action=action)
        return json_response(found) if found["success"] else _refused(400, found)


def _add_vllm(routes: APIRouter, service: Service) -> None:
    @routes.post("/init_weight_transfer_engine", include_in_schema=False)
    async def init_weight_transfer_engine(body: TransferInit) -> Response:
        """Agree how weights come: through a group that meets at an address, or by handles of memory."""
        await engine_call(service, "init_weight_transfer", init_info=body.init_info)
        return json_response({"message": "Weight transfer initialized"})

    @routes.post("/start_weight_update", responses=answers())
    async def start_weight_update(body: TransferStart | None = None) -> Response:
        """Begin an update; of one that was not finished nothing is left."""
        if body is not None and not body.is_checkpoint_format:
            raise ApiError(
                400, "weights are taken by the names of the checkpoint", param="is_checkpoint_format"
            )
        await engine_call(service, "start_weight_update")
        return json_response({"message": "Weight update started"})

    @routes.post("/start_draft_weight_update", include_in_schema=False)
    async def start_draft_weight_update() -> Response:
        raise ApiError(
            400,
            "the weights of a draft cannot be updated: it keeps those it came with",
            code="unsupported_field",
        )

    @routes.post("/update_weights", responses=answers())
    async def update_weights(body: TransferPart) -> Response:
        """A part of an update; or a directory with all weights, which are written at once."""
        if (body.update_info is None) == (body.weight_dir is None):
            raise ApiError(400, "give update_info or weight_dir, one of them", param="update_info")
        if body.update_info is not None:
            await engine_call(service, "receive_weights", update_info=body.update_info)
            return json_response({"message": "Weights updated"})
        found = await engine_call(service, "weights_from_disk", path=body.weight_dir, version=None)
        return json_response({"status": "ok", "weight_version": found["version"]})

    @routes.post("/finish_weight_update", responses=answers())
    async def finish_weight_update(body: TransferEnd | None = None) -> Response:
        """Write what has come since the update began."""
        version = None if body is None else body.weight_version
        found = await engine_call(service, "finish_weight_update", version=version)
        return json_response({"message": "Weight update finished", "weight_version": found["version"]})

    @routes.post("/collective_rpc", responses=answers())
    async def collective_rpc(body: WorkerCall) -> Response:
        """Call a method of the worker, or of what extends it."""
        call = engine_call(
            service, "collective_rpc", method=body.method, args=body.args or [], kwargs=body.kwargs or {}
        )
        try:
            found = await asyncio.wait_for(call, body.timeout)
        except TimeoutError:
            message = f"{body.method} takes longer than {body.timeout:g} s; it goes on"
            raise ApiError(504, message, code="timeout") from None
        return json_response({"results": found})


async def _with_success(call: Any, message: str) -> Response:
    """As SGLang says whether something was done."""
    try:
        found = await call
    except ApiError as error:
        if error.status == 503:  # nothing was asked of anybody
            raise
        told = msgspec.json.decode(error.body)
        return _refused(error.status, {"success": False, "message": told["error"]["message"], **told})
    return json_response({"success": True, "message": message, **(found or {})})


def _refused(status: int, told: dict[str, Any]) -> Response:
    return Response(msgspec.json.encode(told), status, media_type="application/json")


def _abort_all(service: Service) -> None:
    for generation in list(service.generations.values()):
        generation.abort()
