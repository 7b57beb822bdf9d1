"""Controls of the engine for routes: called by name, every refusal with its status."""

from __future__ import annotations

from typing import Any

from ..engine_client.client import EngineCallError, EngineGone
from ..openai.errors import ApiError, unavailable
from ..service import Service
from ..wire.messages import Fault

_STATUS = {Fault.CALLER: 400, Fault.STATE: 409, Fault.TIME: 504, Fault.ENGINE: 500}


async def engine_call(service: Service, name: str, **payload: Any) -> Any:
    """Have the engine do something between two steps; its result.

    503 while no engine serves, if it ends meanwhile, and for want of memory: all of these may pass. 409 while
    the engine sleeps and must not, 504 if somebody else did not come in time.
    """
    service.serving()
    try:
        return await service.engine.call(name, **payload)
    except EngineCallError as error:
        if error.fault is Fault.MEMORY:
            raise unavailable(str(error)) from error
        raise ApiError(_STATUS[error.fault], str(error)) from error
    except OverflowError as error:
        raise ApiError(400, "a number in the body is too large", code="invalid_value") from error
    except EngineGone as error:
        raise unavailable(str(error)) from error
