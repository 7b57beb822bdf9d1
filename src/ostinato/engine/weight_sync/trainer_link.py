"""What a trainer's process can do with the weights of one engine.

An operation that has to wait for the trainer, or to open its memory, is a generator: each callable that it
yields is to be called alongside the engine's steps, and its result sent back. In between, and at the end when
weights are written, no step may be under way. `done_here` runs an operation in the caller's thread.

Note [All of an update]
vLLM's updates come in parts between `start` and `finish`. The parts are kept and written together at
`finish`: no step ever computes with a mixture, and an update that is abandoned midway has changed nothing.
Each of SGLang's calls is an update of its own.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from ostinato.models.transformer import Transformer
from ostinato.models.weight_update import NamedTensors, check_weights
from ostinato.models.weights import checkpoint_tensors

from ..sleeping.served_weights import WeightsReport
from .broadcast_groups import DEFAULT_NAMES, BroadcastGroup, Place, TorchGroup
from .errors import TransferError
from .patience import Patience
from .received_weights import Landing, check_amount, received
from .shared_buffer import SharedBuffer, address_for
from .stateless_nccl import StatelessGroup
from .weight_checks import WeightChecks
from .wire_formats import Pairs, announced, sglang_tensors, vllm_tensors

logger = logging.getLogger("ostinato.engine")

Apply = Callable[[NamedTensors | str | Path, str | None], WeightsReport]
_Result = TypeVar("_Result")
Operation = Generator[Callable[[], Any], Any, _Result]
_WHOLE = 2**62
"""`packed_bytes` for everything at once."""
_PACKED_BYTES = 2**30
"""vLLM's default."""
_GIVING_UP_SECONDS = 5.0
_BY_GROUP = {"master_address", "master_port", "rank_offset", "world_size"}
_BY_EITHER = {"packed", "packed_buffer_size_bytes", "packed_num_buffers"}


def done_here(operation: Operation[_Result]) -> _Result:
    """Run an operation to its end; returns its result."""
    found: Any = None
    error: Exception | None = None
    while True:
        is_over, wanted = advanced(operation, found, error)
        if is_over:
            result: _Result = wanted
            return result
        found, error = None, None
        try:
            found = wanted()
        except Exception as problem:
            error = problem


def advanced(operation: Operation[Any], found: Any, error: Exception | None) -> tuple[bool, Any]:
    """Resume with the result of the last callable: (True, result) at the end, else (False, next callable)."""
    try:
        return False, operation.send(found) if error is None else operation.throw(error)
    except StopIteration as end:
        return True, end.value


class TrainerLink:
    """The trainer's access to one engine."""

    def __init__(self, model: Transformer, apply: Apply, seconds: float) -> None:
        """`apply` writes weights, all or none, as `LLM.update_weights`; a trainer has `seconds` to answer."""
        self.model, self.apply = model, apply
        self.patience = Patience(seconds)
        self._groups: dict[str, BroadcastGroup] = {}
        self._transfer: _Transfer | None = None
        self._arrived: dict[str, Tensor] | None = None
        """Weights of the update that was started and is not finished."""
        self._busy = threading.Lock()
        self.checks = WeightChecks(model, apply)

    @property
    def _device(self) -> torch.device:
        return self.model.embed_tokens.weight.device

    @property
    def _most_bytes(self) -> int:
        """An upper bound: every weight in the largest dtype accepted, with an output layer even if tied."""
        return 8 * sum(view.numel() for view in checkpoint_tensors(self.model).values())

    # -- as SGLang's clients ask for it ------------------------------------------------------------

    def update_from_tensors(
        self, payloads: object, load_format: object, version: str | None
    ) -> Operation[WeightsReport]:
        """Weights in memory that another process shares."""
        with self.alone():
            pairs: Pairs = yield lambda: sglang_tensors(payloads, load_format)
            return self.apply(pairs, version)

    def update_through_buffer(self, handles: object, version: str | None) -> Operation[WeightsReport]:
        """Weights that another process puts into its buffer, one filling after the other."""
        address = address_for(self._device, handles)
        with self.alone():
            buffer = SharedBuffer(address, self._device, self.patience, self._most_bytes)
            try:
                pairs: Pairs = yield buffer.received
                try:
                    report = self.apply(pairs, version)
                except Exception as error:
                    told = f"{type(error).__name__}: {error}"
                    yield lambda: buffer.finish(told)
                    raise
                yield buffer.finish
                return report
            finally:
                buffer.close()

    def join(
        self, group_name: str, address: str, port: int, rank_offset: int, world_size: int, backend: str
    ) -> Operation[None]:
        """Meet the trainer in a group of torch.distributed; an earlier one of the same name is left."""
        if not isinstance(group_name, str) or not group_name:
            raise TransferError(f"group_name must be a non-empty string, not {group_name!r}")
        place = Place(address, port, rank_offset, world_size)
        yield self.give_up_others
        with self.alone():
            if (old := self._groups.pop(group_name, None)) is not None:
                yield lambda: left(old)
            self._groups[group_name] = yield lambda: TorchGroup(
                place, (group_name, group_name), backend, self._device, self.patience
            )

    def leave(self, group_name: str) -> Operation[None]:
        """Leave a group."""
        with self.alone():
            group = self._groups.pop(group_name, None)
            if group is None:
                raise TransferError(f"unknown group {group_name!r}: {self._known_groups}")
            yield lambda: left(group)

    def update_from_group(
        self,
        group_name: str,
        names: object,
        dtypes: object,
        shapes: object,
        load_format: object,
        version: str | None,
    ) -> Operation[WeightsReport]:
        """Weights that rank 0 of a group broadcasts."""
        if load_format not in (None, "auto", "flattened_bucket"):
            raise TransferError(f"unknown load_format {load_format!r}: leave it out, or use flattened_bucket")
        if group_name not in self._groups:
            raise TransferError(f"unknown group {group_name!r}: {self._known_groups}")
        entries = announced(names, dtypes, shapes)
        check_amount(entries, self._most_bytes)
        with self.alone():
            group = self._groups[group_name]
            packed = _WHOLE if load_format == "flattened_bucket" else None
            try:
                pairs: Pairs = yield lambda: received(group, entries, 0, packed)
            except Exception:
                # The others' position is unknown: the next broadcast could be mistaken for this one.
                self._groups.pop(group_name, None)
                yield lambda: left(group)
                raise
            return self.apply(pairs, version)

    @property
    def _known_groups(self) -> str:
        known = ", ".join(self._groups)
        return f"the groups are {known}" if known else "there are none, call init_weights_update_group first"

    # -- as vLLM's clients ask for it --------------------------------------------------------------

    def init_transfer(self, init_info: object) -> Operation[None]:
        """Agree with the trainer on how weights come: through a group, or, if no address is given, by handles
        of its memory."""
        given = _checked_keys(init_info, _BY_GROUP | _BY_EITHER, "init_info")
        packed_bytes = given.get("packed_buffer_size_bytes", _PACKED_BYTES)
        if not isinstance(packed_bytes, int) or packed_bytes < 1:
            raise TransferError(
                f"packed_buffer_size_bytes must be an integer of at least 1, not {packed_bytes!r}"
            )
        is_packed = bool(given.get("packed", False))
        yield self.give_up_others
        with self.alone():
            old, self._transfer = self._transfer, None
            if old is not None and old.group is not None:
                group = old.group
                yield lambda: left(group)
            if not given.keys() & _BY_GROUP:
                self._transfer = _Transfer(None, is_packed, packed_bytes)
                return
            if missing := _BY_GROUP - given.keys():
                raise TransferError(f"init_info must also have {', '.join(sorted(missing))}")
            place = Place(
                *(given[each] for each in ("master_address", "master_port", "rank_offset", "world_size"))
            )
            self._transfer = _Transfer((yield lambda: self._met(place)), is_packed, packed_bytes)

    def _met(self, place: Place) -> BroadcastGroup:
        if self._device.type == "cuda":
            return StatelessGroup(place, self._device, self.patience)
        return TorchGroup(place, DEFAULT_NAMES, "gloo", self._device, self.patience)

    def start(self) -> None:
        """Begin an update; an unfinished one is dropped."""
        if self._arrived:
            logger.warning(
                "the previous update of weights was not finished: its %d weights are dropped",
                len(self._arrived),
            )
        self._arrived = {}

    def receive(self, update_info: object) -> Operation[int]:
        """Receive a part of an update; returns its number of weights. If it fails, the update is over."""
        transfer, arrived = self._transfer, self._arrived
        if transfer is None:
            raise TransferError("call init_weight_transfer_engine before update_weights")
        if arrived is None:
            raise TransferError("call start_weight_update before update_weights")
        with self.alone():
            try:
                pairs: Pairs = yield from transfer.pairs(self, update_info)
                check_weights(self.model, pairs)
            except BaseException:
                self._arrived = None
                raise
            arrived.update(pairs)
            return len(pairs)

    def finish(self, version: str | None) -> WeightsReport | None:
        """Write what has arrived; None if nothing has."""
        arrived = self._arrived
        if arrived is None:
            raise TransferError("no update is under way: call start_weight_update first")
        report = self.apply(arrived, version) if arrived else None
        self._arrived = None
        return report

    def drop_group(self, transfer: _Transfer) -> None:
        """Forget a transfer's group after a failure."""
        if self._transfer is transfer:
            self._transfer = None

    @property
    def device(self) -> torch.device:
        """The device of the weights."""
        return self._device

    def check_amount(self, entries: list[Any]) -> None:
        """Raises TransferError for more bytes than any update has."""
        check_amount(entries, self._most_bytes)

    # -- both --------------------------------------------------------------------------------------

    @contextmanager
    def alone(self) -> Iterator[None]:
        """One transfer at a time. Raises TransferError if another one is under way."""
        if not self._busy.acquire(blocking=False):
            raise TransferError("another transfer of weights is under way")
        try:
            yield
        finally:
            self._busy.release()

    def give_up_others(self) -> None:
        """Stop any wait: a trainer that connects again has lost what we may be waiting for, or is another."""
        end = time.monotonic() + _GIVING_UP_SECONDS
        while self._busy.locked() and time.monotonic() < end:
            self.patience.give_up()
            time.sleep(0.01)

    def close(self) -> None:
        """Leave all groups."""
        groups = [*self._groups.values()]
        if self._transfer is not None and self._transfer.group is not None:
            groups.append(self._transfer.group)
        self._groups, self._transfer, self._arrived = {}, None, None
        for group in groups:
            left(group)


class _Transfer:
    """How weights come in vLLM's protocol."""

    def __init__(self, group: BroadcastGroup | None, is_packed: bool, packed_bytes: int) -> None:
        self.group = group
        self._is_packed = is_packed
        self._packed_bytes = packed_bytes

    def pairs(self, link: TrainerLink, update_info: object) -> Operation[Pairs]:
        handles = {"ipc_handles", "ipc_handles_pickled", "tensor_sizes", "num_updates_list"}
        known = {"names", "dtype_names", "shapes", *handles, "packed"}
        given = _checked_keys(update_info, known, "update_info")
        entries = announced(given.get("names"), given.get("dtype_names"), given.get("shapes"))
        link.check_amount(entries)
        group = self.group
        if group is None:
            return (yield lambda: self._copied(given, link.device))
        # TRL's async_grpo passes `packed` with each update, as vLLM 0.22 did.
        packed = self._packed_bytes if given.get("packed", self._is_packed) else None
        try:
            return (yield lambda: received(group, entries, 0, packed))
        except Exception:
            link.drop_group(self)
            yield lambda: left(group)
            raise

    def _copied(self, given: dict[str, Any], device: torch.device) -> Pairs:
        """Copies, because the trainer reuses its memory for the next part as soon as this one is answered."""
        pairs = vllm_tensors(given, device, is_packed=self._is_packed)
        landing = Landing(device, sum(tensor.nbytes for _, tensor in pairs))
        copies = [(name, landing.copy(tensor)) for name, tensor in pairs]
        torch.cuda.current_stream(device).synchronize()
        return copies


def left(group: BroadcastGroup) -> None:
    """Leave a group, cleanly or not."""
    try:
        group.abort()
    except (TransferError, RuntimeError):
        logger.warning("a process group could not be left cleanly", exc_info=True)


def _checked_keys(given: object, known: set[str], what: str) -> dict[str, Any]:
    if not isinstance(given, Mapping):
        raise TransferError(f"{what} must be an object, not {type(given).__name__}")
    if strange := sorted(map(str, given.keys() - known)):
        raise TransferError(f"{what} has no field {strange[0]}: the fields are {', '.join(sorted(known))}")
    return {name: value for name, value in given.items() if value is not None}
