"""The static inputs of captured graphs, and the one piece of code that fills them."""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, NoReturn, TypeAlias

import numpy as np
import torch

from ..backends import backend_for
from ..dispatching.descriptor import BatchDescriptor, BatchShape
from ..errors import BatchError, ConfigError
from ..memory import Allocate
from .fields import Extent, Field
from .staging import Layout, Staging, array_dtype, as_array, as_tensor, raw_scalar

Batch: TypeAlias = Mapping[str, Any]

_MOST_PLANS = 4096

_Copy: TypeAlias = tuple[list[int], list[torch.Tensor], list[torch.Tensor]]
"""One grouped copy: the fields whose values it copies, their destinations, and the padding after them."""


class FillPlan:
    """How to fill one rung with one number of real rows, as far as that does not depend on the values."""

    def __init__(
        self, fields: Sequence[Field], layout: Layout, views: Sequence[torch.Tensor], shape: BatchShape
    ) -> None:
        self.layout = layout
        self.expected = [field.full_shape(shape.num_tokens, shape.num_reqs) for field in fields]
        self.spans: dict[tuple[int, ...], tuple[int, int, torch.Tensor]] = {}
        self.copies: dict[tuple[tuple[int, ...], bool], list[_Copy]] = {}
        self.of_all: list[_Copy] | None = None
        """Of these, those that copy all fields from the device."""
        self.head_slices: list[tuple[Any, ...]] = []
        self.tail_slices: list[tuple[Any, ...] | None] = []
        for field in fields:
            rows, before = field.rows(shape.num_tokens, shape.num_reqs), (slice(None),) * field.dim
            fixed = field.per is Extent.FIXED
            padded = rows < field.rows(layout.num_tokens, layout.num_reqs)
            self.head_slices.append((...,) if fixed else (*before, slice(0, rows)))
            self.tail_slices.append((*before, slice(rows, None)) if padded else None)
        self.heads = [view[head] for view, head in zip(views, self.head_slices, strict=True)]
        self.tails = [
            None if tail is None else view[tail] for view, tail in zip(views, self.tail_slices, strict=True)
        ]


class InputBuffers:
    """Declared inputs at fixed addresses. Only `fill` writes values into them."""

    def __init__(
        self,
        fields: Sequence[Field],
        *,
        max_tokens: int,
        max_reqs: int | None = None,
        device: torch.device | str,
        allocate: Allocate | None = None,
    ) -> None:
        """`max_tokens`, `max_reqs`: the largest rung; all smaller ones share its memory. `allocate`: what
        allocates the memory, for example a pool's `allocate`; default: torch's allocator."""
        if not fields:
            raise ConfigError("a step needs at least one input field")
        names = [field.name for field in fields]
        if len(set(names)) != len(names):
            raise ConfigError(f"field names must be unique: {', '.join(names)}")
        if max_tokens < 1 or (max_reqs is not None and max_reqs < 1):
            raise ConfigError("max_tokens and max_reqs must be 1 or more")
        self.fields = tuple(fields)
        self.max_tokens = max_tokens
        self.max_reqs = max_tokens if max_reqs is None else max_reqs
        capacity = Layout(self.fields, self.max_tokens, self.max_reqs).nbytes
        self.device = backend_for(device).device
        self._is_on_host = self.device.type == "cpu"
        self._allocate = allocate or (lambda n: torch.empty(n, dtype=torch.uint8, device=self.device))
        with torch.inference_mode(False):
            self.arena = self._allocate(capacity).zero_()
        self._begins = self.arena.data_ptr()
        self._ends = self._begins + self.arena.nbytes
        self._staging: Staging | None = None
        self._layouts: dict[tuple[int, int], tuple[Layout, list[torch.Tensor]]] = {}
        self._plans: dict[tuple[int, int, int, int], FillPlan] = {}
        self._every = tuple(range(len(self.fields)))
        self._token_field = next((field for field in fields if field.per is Extent.TOKEN), None)
        self._request_field = next((field for field in fields if field.per is Extent.REQUEST), None)
        self._templates: dict[tuple[int, bool], torch.Tensor] = {}
        self.holds: object = None
        """What the batch in the buffers belongs to, if the code that filled them set it; every fill resets
        it."""
        self._pads = [raw_scalar(field.pad, field.dtype) for field in self.fields]
        self._arrays = [(field.name, array_dtype(field.dtype)) for field in self.fields]
        self._poisons = [raw_scalar(field.poison_value, field.dtype) for field in self.fields]

    @property
    def bytes(self) -> int:
        """Bytes of the static inputs on the device."""
        return self.arena.nbytes

    def views(self, descriptor: BatchDescriptor) -> dict[str, torch.Tensor]:
        """The tensors that a graph with this descriptor reads, by field name."""
        _, views = self._layout(descriptor)
        return {field.name: view for field, view in zip(self.fields, views, strict=True)}

    def shape_of(self, batch: Batch) -> BatchShape:
        """The shape of a batch, from the rows of its fields. One token per request is uniform decode."""
        tokens = self._rows_given(batch, self._token_field)
        reqs = self._rows_given(batch, self._request_field)
        return _shape_of(reqs if tokens is None else tokens, tokens if reqs is None else reqs)

    def fill(
        self, batch: Batch, shape: BatchShape, descriptor: BatchDescriptor, *, poison: bool = False
    ) -> None:
        """Copy a batch into the buffers and refill the padded rows of every field.

        All fields are checked before anything is written.
        """
        self.fill_as(self.plan(shape, descriptor), batch, poison=poison)

    def fill_as(self, plan: FillPlan, batch: Batch, *, poison: bool = False) -> None:
        """`fill` with a plan that was made before."""
        values, host = (
            self._all_from_host(batch, plan.expected)
            or self._all_on_device(batch, plan.expected)
            or self._checked(batch, plan.expected)
        )
        self.holds = None
        if not host and not poison:
            self._copy_all(plan, values)
            return
        if host and self._is_on_host:
            for i in host:
                values[i] = as_tensor(values[i], self.fields[i].dtype)
            host = []
        if host:
            self._send_host(plan, values, tuple(host), poison)
        if len(host) < len(values):
            self._copy_device(plan, values, host, poison)

    def fill_with(self, plan: FillPlan, values: list[torch.Tensor]) -> None:
        """`fill_as` with one plain tensor for each field, in order, which are known to have the types and
        shapes of the fields, to have no gradients and to be on the device."""
        begins, ends = self._begins, self._ends
        for position, value in enumerate(values):
            if begins <= value.data_ptr() < ends:
                values[position] = value.clone()
        self.holds = None
        self._copy_all(plan, values)

    def fill_padding(self, descriptor: BatchDescriptor) -> None:
        """Make every row of a rung a padded row."""
        self.holds = None
        for field, view in zip(self.fields, self._layout(descriptor)[1], strict=True):
            view.fill_(field.pad)

    @contextmanager
    def kept(self) -> Iterator[None]:
        """A context that restores the contents of the buffers when it ends."""
        held, contents = self.holds, None if self.holds is None else self.arena.clone()
        try:
            yield
        finally:
            if contents is not None:
                self.arena.copy_(contents)
            self.holds = held

    def on_device(self, batch: Batch, shape: BatchShape) -> dict[str, torch.Tensor]:
        """The checked batch on the device, without padding: the inputs of an eager step."""
        expected = [field.full_shape(shape.num_tokens, shape.num_reqs) for field in self.fields]
        values, _ = self._checked(batch, expected)
        moved = {}
        for field, value in zip(self.fields, values, strict=True):
            tensor = as_tensor(value, field.dtype) if isinstance(value, np.ndarray) else value
            moved[field.name] = tensor.to(self.device)
        return moved

    def plan(self, shape: BatchShape, descriptor: BatchDescriptor) -> FillPlan:
        """How to fill a graph's buffers with a batch of this shape; cached."""
        size = (shape.num_tokens, shape.num_reqs, descriptor.num_tokens, descriptor.num_reqs)
        plan = self._plans.get(size)
        if plan is None:
            if shape.num_tokens > descriptor.num_tokens or shape.num_reqs > descriptor.num_reqs:
                raise BatchError(f"a batch of {shape} does not fit into the graph for {descriptor}")
            if len(self._plans) >= _MOST_PLANS:
                self._plans.clear()
            with torch.inference_mode(False):
                plan = FillPlan(self.fields, *self._layout(descriptor), shape)
            self._plans[size] = plan
        return plan

    # -- internals ---------------------------------------------------------------------------------

    def _rows_given(self, batch: Batch, field: Field | None) -> int | None:
        if field is None:
            return None
        try:
            shape = batch[field.name].shape
        except KeyError:
            self._refuse_names(batch)
        except AttributeError:
            got = type(batch[field.name]).__name__
            raise BatchError(f"{field.name}: expected a tensor or array, got {got}") from None
        if len(shape) != len(field.shape) + 1:
            raise BatchError(f"{field.name}: expected {len(field.shape) + 1} dimensions, got {len(shape)}")
        if shape[field.dim] % field.each:
            raise BatchError(
                f"{field.name}: expected a multiple of {field.each} rows, got {shape[field.dim]}"
            )
        return int(shape[field.dim]) // field.each

    def _refuse_names(self, batch: Batch) -> NoReturn:
        declared = {field.name for field in self.fields}
        missing = sorted(declared - set(batch))
        unknown = sorted(set(batch) - declared)
        parts = [f"missing {', '.join(missing)}"] if missing else []
        parts += [f"unknown {', '.join(map(str, unknown))}"] if unknown else []
        raise BatchError(f"the batch does not match the declared fields: {'; '.join(parts)}")

    def _all_from_host(
        self, batch: Batch, expected: Sequence[tuple[int, ...]]
    ) -> tuple[list[Any], list[int]] | None:
        """What `_checked` would return if all values are arrays, and right; else None. Most batches are."""
        if len(batch) != len(self.fields):
            return None
        values: list[Any] = []
        for (name, dtype), shape in zip(self._arrays, expected, strict=True):
            value = batch.get(name)
            if type(value) is not np.ndarray or value.dtype != dtype or value.shape != shape:
                return None
            values.append(value)
        return values, list(range(len(values)))

    def _all_on_device(
        self, batch: Batch, expected: Sequence[tuple[int, ...]]
    ) -> tuple[list[Any], list[int]] | None:
        """What `_checked` would return if all are plain tensors on the device, and right; else None."""
        if len(batch) != len(self.fields):
            return None
        values: list[Any] = []
        for field, shape in zip(self.fields, expected, strict=True):
            value = batch.get(field.name)
            if type(value) is not torch.Tensor or value.dtype != field.dtype or value.shape != shape:
                return None
            if value.requires_grad or value.device != self.device:
                return None
            if self._begins <= value.data_ptr() < self._ends:
                return None
            values.append(value)
        return values, []

    def _checked(self, batch: Batch, expected: Sequence[tuple[int, ...]]) -> tuple[list[Any], list[int]]:
        """The values in field order, and which of them are arrays from the host. Or an error."""
        if len(batch) != len(self.fields):
            self._refuse_names(batch)
        values: list[Any] = []
        host: list[int] = []
        for position, field in enumerate(self.fields):
            value = batch.get(field.name)
            dtype: Any = field.dtype
            if isinstance(value, np.ndarray):
                dtype = array_dtype(dtype)
            elif field.name not in batch:
                self._refuse_names(batch)
            elif not isinstance(value, torch.Tensor):
                raise BatchError(f"{field.name}: expected a tensor or array, got {type(value).__name__}")
            if value.dtype != dtype:
                raise BatchError(f"{field.name}: expected {dtype}, got {value.dtype}")
            if value.shape != expected[position]:
                raise BatchError(
                    f"{field.name}: expected shape {expected[position]}, got {tuple(value.shape)}"
                )
            if isinstance(value, np.ndarray):
                host.append(position)
            elif value.device == self.device:
                # A result that is an earlier input may come back as another one: it lies in the arena.
                ours = self._begins <= value.data_ptr() < self._ends
                value = value.detach() if value.requires_grad else value
                value = value.clone() if ours else value
            elif value.device.type == "cpu":
                value = as_array(value)
                host.append(position)
            else:
                raise BatchError(f"{field.name}: expected {self.device} or cpu, got {value.device}")
            values.append(value)
        return values, host

    def _layout(self, descriptor: BatchDescriptor) -> tuple[Layout, list[torch.Tensor]]:
        """A rung's layout, and its fields in order."""
        size = num_tokens, num_reqs = descriptor.num_tokens, descriptor.num_reqs
        if num_tokens > self.max_tokens or num_reqs > self.max_reqs:
            raise BatchError(
                f"{num_tokens} tokens, {num_reqs} requests do not fit into buffers for {self.max_tokens} "
                f"tokens, {self.max_reqs} requests"
            )
        if size not in self._layouts:
            layout = Layout(self.fields, *size)
            with torch.inference_mode(False):
                self._layouts[size] = (layout, layout.views(self.arena, self.fields))
        return self._layouts[size]

    def _send_host(self, plan: FillPlan, values: Sequence[Any], host: tuple[int, ...], poison: bool) -> None:
        """Pack host fields into a pinned slot and send the span that covers them in one copy.

        Device fields inside the span are overwritten here and filled by the copy that follows.
        """
        if self._staging is None:
            self._staging = Staging(self.bytes, self.device)
        span = plan.spans.get(host)
        if span is None:
            start, end = plan.layout.starts[host[0]], plan.layout.ends[host[-1]]
            with torch.inference_mode(False):
                span = plan.spans[host] = (start, end, self.arena[start:end])
        start, end, target = span
        source, arrays = self._staging.slot(plan.layout, self.fields, start, end)
        fillers = self._poisons if poison else self._pads
        for i in host:
            array = arrays[i]
            array[plan.head_slices[i]] = values[i]
            tail = plan.tail_slices[i]
            if tail is not None:
                array[tail] = fillers[i]
        target.copy_(source, non_blocking=True)
        self._staging.sent()

    def _copy_all(self, plan: FillPlan, values: Sequence[torch.Tensor]) -> None:
        """One grouped copy for each type, of all fields."""
        copies = plan.of_all
        if copies is None:
            with torch.inference_mode(False), torch.no_grad():
                copies = plan.of_all = self._copies(plan, self._every, False)
        for positions, targets, padding in copies:
            torch._foreach_copy_(targets, [values[i] for i in positions] + padding)

    def _copy_device(self, plan: FillPlan, values: Sequence[Any], host: Sequence[int], poison: bool) -> None:
        """One grouped copy for each type: real rows from the batch, padded rows from a template."""
        given = tuple(i for i in range(len(values)) if i not in host) if host else self._every
        copies = plan.copies.get((given, poison))
        if copies is None:
            with torch.inference_mode(False), torch.no_grad():
                copies = plan.copies[given, poison] = self._copies(plan, given, poison)
        for positions, targets, padding in copies:
            torch._foreach_copy_(targets, [values[i] for i in positions] + padding)

    def _copies(self, plan: FillPlan, given: Sequence[int], poison: bool) -> list[_Copy]:
        copies: dict[torch.dtype, _Copy] = {}
        for i in given:
            positions, targets, _ = copies.setdefault(self.fields[i].dtype, ([], [], []))
            positions.append(i)
            targets.append(plan.heads[i])
        for i in given:
            field, tail = self.fields[i], plan.tails[i]
            if tail is not None:
                _, targets, padding = copies[field.dtype]
                targets.append(tail)
                padding.append(self._template(i, poison).narrow(field.dim, 0, tail.size(field.dim)))
        return list(copies.values())

    def _template(self, position: int, poison: bool) -> torch.Tensor:
        """A whole field of padding, to copy padded rows from."""
        key = (position, poison)
        if key not in self._templates:
            field = self.fields[position]
            value = field.poison_value if poison else field.pad
            shape = field.full_shape(self.max_tokens, self.max_reqs)
            memory = self._allocate(math.prod(shape) * field.dtype.itemsize)
            self._templates[key] = memory.view(field.dtype).view(shape).fill_(value)
        return self._templates[key]


@lru_cache(_MOST_PLANS)
def _shape_of(tokens: int | None, reqs: int | None) -> BatchShape:
    if tokens is None or reqs is None:
        raise BatchError("the batch has no field with rows: pass the step's shape")
    return BatchShape(num_tokens=tokens, num_reqs=reqs, query_len=1 if tokens == reqs else None)
