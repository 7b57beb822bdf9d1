"""The endpoints that load and unload adapters, with the answers of vLLM and of SGLang. For admins."""

from __future__ import annotations

from typing import Any

import msgspec
from fastapi import APIRouter
from starlette.responses import PlainTextResponse, Response

from ..openai.body import Body, Int64, Text
from ..openai.errors import ApiError
from ..openai.served_model import ServedModel
from ..service import Service
from ..wire.messages import AdapterInfo
from .api_document import answers
from .engine_calls import engine_call
from .json_answers import json_response
from .known_query import admin_router


class LoadAdapter(Body):
    """vLLM's."""

    lora_name: Text
    lora_path: Text
    load_inplace: bool = False
    """Replace the adapter of this name; requests under way keep the one they have."""
    is_3d_lora_weight: bool = False


class UnloadAdapter(Body):
    """vLLM's and SGLang's."""

    lora_name: Text
    lora_int_id: Int64 | None = None
    lora_id: str | None = None


class LoadAdapterAsSglang(Body):
    """SGLang's."""

    lora_name: Text
    lora_path: Text
    pinned: bool = False
    lora_id: str | None = None


class LoadAdapterFromTensors(Body):
    """SGLang's; tensors as it pickles them, in base64."""

    lora_name: Text
    config_dict: dict[str, Any]
    """What adapter_config.json would hold."""
    serialized_tensors: Text | None = None
    serialized_named_tensors: Text | None = None
    """Its older name."""
    load_format: str | None = None
    pinned: bool = False
    lora_id: str | None = None


def adapter_routes(service: Service) -> APIRouter:
    """The routes of adapters."""
    routes = admin_router()

    @routes.post("/v1/load_lora_adapter", responses=answers())
    async def load(body: LoadAdapter) -> Response:
        """Load an adapter from a directory of the server's machine; other requests go on."""
        if body.is_3d_lora_weight:
            message = "is_3d_lora_weight is not supported: there are no experts"
            raise ApiError(400, message, param="is_3d_lora_weight")
        options = {"load_inplace": body.load_inplace}
        await _load(service, body.lora_name, body.lora_path, **options)
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' added successfully.")

    @routes.post("/v1/unload_lora_adapter", responses=answers())
    async def unload(body: UnloadAdapter) -> Response:
        """Forget an adapter that no request uses."""
        await _unload(service, body)
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")

    @routes.post("/load_lora_adapter", responses=answers())
    async def load_as_sglang(body: LoadAdapterAsSglang) -> Response:
        """The same as SGLang has it."""
        try:
            await _load(service, body.lora_name, body.lora_path, pinned=body.pinned)
        except ApiError as error:
            return _failed(service, error)
        return _succeeded(service)

    @routes.post("/load_lora_adapter_from_tensors", responses=answers())
    async def load_from_tensors(body: LoadAdapterFromTensors) -> Response:
        """Load an adapter that a process of this machine has in its memory."""
        payload = body.serialized_tensors or body.serialized_named_tensors
        if payload is None:
            raise ApiError(400, "serialized_tensors are missing", param="serialized_tensors")
        try:
            model = _model_without(service, body.lora_name)
            what = {"config": body.config_dict, "payload": payload, "load_format": body.load_format}
            name = "load_adapter_from_tensors"
            options = {"adapter": body.lora_name, "pinned": body.pinned, **what}
            _take_in(model, await engine_call(service, name, **options))
        except ApiError as error:
            return _failed(service, error)
        return _succeeded(service)

    @routes.post("/unload_lora_adapter", responses=answers())
    async def unload_as_sglang(body: UnloadAdapter) -> Response:
        """The same as SGLang has it."""
        try:
            await _unload(service, body)
        except ApiError as error:
            return _failed(service, error)
        return _succeeded(service)

    return routes


async def _load(service: Service, name: str, path: str, **options: bool) -> None:
    model = _model_without(service, name)
    _take_in(model, await engine_call(service, "load_adapter", adapter=name, path=path, **options))


def _model_without(service: Service, name: str) -> ServedModel:
    """The model; 400 if the adapter would have its name."""
    model = service.serving()
    if name == model.name:
        raise ApiError(400, f"lora_name: {name!r} is the name of the model itself", param="lora_name")
    return model


async def _unload(service: Service, body: UnloadAdapter) -> None:
    model = service.serving()
    if body.lora_name not in model.adapters:
        message = f"the adapter {body.lora_name!r} cannot be found: it is not loaded"
        raise ApiError(404, message, param="lora_name", code="not_found")
    known = model.adapters[body.lora_name]
    if body.lora_int_id is not None and body.lora_int_id != known.id:
        message = f"lora_int_id: the adapter {body.lora_name!r} has {known.id}, not {body.lora_int_id}"
        raise ApiError(400, message, param="lora_int_id")
    _take_in(model, await engine_call(service, "unload_adapter", adapter=body.lora_name))


def _take_in(model: ServedModel, listed: Any) -> None:
    """What the engine has now is what requests can name."""
    found = msgspec.convert(listed, list[AdapterInfo])
    model.adapters.clear()
    model.adapters.update({each.name: each for each in found})


def _succeeded(service: Service) -> Response:
    return json_response({"success": True, "error_message": "", "loaded_adapters": _listed(service)})


def _failed(service: Service, error: ApiError) -> Response:
    """SGLang's answer to a refusal; of other errors the usual one."""
    if error.status not in (400, 404):
        raise error
    body = {"success": False, "error_message": str(error), "loaded_adapters": _listed(service)}
    return Response(msgspec.json.encode(body), 400, media_type="application/json")


def _listed(service: Service) -> dict[str, Any]:
    found = {}
    for name, each in service.serving().adapters.items():
        path = each.path or "__tensor__"
        found[name] = {"lora_id": str(each.id), "lora_name": name, "lora_path": path, "pinned": each.pinned}
    return found
