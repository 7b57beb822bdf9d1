"""The controls of an engine's weights, by name: what a trainer's process may do with them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgspec

from ostinato.engine.llm import LLM
from ostinato.engine.sleeping.served_weights import WeightsReport
from ostinato.engine.vllm_api.trainer_services import worker_call
from ostinato.engine.weight_sync.parameter_link import ParameterLink
from ostinato.models.weight_update import NamedTensors

from .control_calls import Control


class WeightControls:
    """Of one engine."""

    def __init__(self, llm: LLM) -> None:
        self._llm = llm
        self._link = llm.trainer_link
        self._parameters = ParameterLink(llm.trainer_link)

    def by_name(self) -> Mapping[str, Control]:
        """All that a call can name."""
        return {
            "weights_from_disk": self._from_disk,
            "weights_from_tensors": self._from_tensors,
            "weights_from_group": self._from_group,
            "weights_through_buffer": self._through_buffer,
            "join_group": self._link.join,
            "leave_group": self._link.leave,
            "init_weight_transfer": self._link.init_transfer,
            "start_weight_update": self._link.start,
            "receive_weights": self._link.receive,
            "finish_weight_update": self._finish,
            "listen_for_trainer": self._parameters.listen,
            "meet_trainer": self._parameters.meet,
            "leave_trainer": self._parameters.leave,
            "check_parameter": self._parameters.check,
            "receive_parameter": self._receive_parameter,
            "weight_version": self._version,
            "rename_weights": self._rename,
            "weights_by_name": self._link.checks.values,
            "check_weights": self._link.checks.run,
            "collective_rpc": self._collective_rpc,
        }

    def _apply(self, new: NamedTensors | Path, version: str | None) -> dict[str, Any]:
        return _told(self._llm.update_weights(new, version=version))

    def _from_disk(self, path: str, version: str | None) -> object:
        scheduler = self._llm.engine.core.scheduler
        waiting = len(scheduler.running) + len(scheduler.waiting) if scheduler.is_paused else 0
        return {**self._apply(Path(path), version), "num_paused_requests": waiting}

    def _from_tensors(self, payloads: list[str], load_format: str | None, version: str | None) -> Any:
        return _told((yield from self._link.update_from_tensors(payloads, load_format, version)))

    def _from_group(self, load_format: str | None, version: str | None, **what: Any) -> Any:
        operation = self._link.update_from_group(**what, load_format=load_format, version=version)
        return _told((yield from operation))

    def _through_buffer(self, handles: dict[str, str], version: str | None) -> Any:
        return _told((yield from self._link.update_through_buffer(handles, version)))

    def _receive_parameter(self, weight: str, dtype: str, shape: list[int]) -> Any:
        return _told((yield from self._parameters.receive(weight, dtype, shape)))

    def _finish(self, version: str | None) -> object:
        report = self._link.finish(version)
        if report is None and version is not None:
            self._llm.update_weight_version(version)
        return self._version() if report is None else _told(report)

    def _version(self) -> dict[str, Any]:
        return {"version": self._llm.weight_version}

    def _rename(self, version: str) -> object:
        self._llm.update_weight_version(version)
        return self._version()

    def _collective_rpc(self, method: str, args: list[Any], kwargs: dict[str, Any]) -> object:
        call = worker_call(self._llm.worker, method, args, kwargs)
        return [_sent(self._llm.between_steps(call))]


def _told(report: WeightsReport) -> dict[str, Any]:
    return {**asdict(report), "names": len(report.names)}


def _sent(result: object) -> object:
    """What a call returned as JSON, in words if it has no other form."""
    try:
        msgspec.json.encode(result)
    except (TypeError, ValueError):
        return str(result)
    return result
