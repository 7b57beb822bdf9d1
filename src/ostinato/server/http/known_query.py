"""What stands behind the question mark of an admin's call: each name acts, or is refused by it.

Clients add names of their own to other paths (`api-version`, for one), and there they change nothing.
"""

from __future__ import annotations

from typing import Any, get_args, get_origin

from fastapi import APIRouter, Depends, Request

from ..openai.errors import ApiError


def admin_router() -> APIRouter:
    """For routes whose parameters decide what becomes of requests, memory and weights."""
    return APIRouter(dependencies=[Depends(_refuse_strangers)])


async def _refuse_strangers(request: Request) -> None:
    """400 for a parameter that the route does not have, and for one of a single value that is given twice."""
    route: Any = request.scope["route"]
    known = {each.alias: each.field_info.annotation for each in route.dependant.query_params}
    for name in request.query_params:
        if name not in known:
            there = f"there are {', '.join(known)}" if known else "this call has none"
            message = f"parameter {name!r} is not supported: {there}"
            raise ApiError(400, message, param=name, code="unsupported_field")
        if len(request.query_params.getlist(name)) > 1 and not _is_list(known[name]):
            raise ApiError(400, f"{name} is given twice", param=name, code="invalid_value")


def _is_list(annotation: Any) -> bool:
    return any(get_origin(each) is list for each in (annotation, *get_args(annotation)))
