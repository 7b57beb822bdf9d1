"""The state of running requests on the device, one row each, and how the host changes it.

All of it lies in one array of 32-bit cells, of which the host keeps a mirror: page table, lengths, last
tokens, sampling parameters. Changes since the last step are sent as (place, value) pairs in one packed copy
and written by one small graph, however many requests joined or got pages. A step without changes sends
nothing.

The mirror does not follow what the device itself advances (lengths, last tokens): such a field is sent
whenever it is written, all others only where they differ from the row's contents.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from dataclasses import field as dataclass_field

import numpy as np
import torch

from ostinato.graphs import (
    CaptureOptions,
    CudaGraphRunner,
    Dispatcher,
    Field,
    GraphMode,
    GraphPool,
    InputBuffers,
    Ladder,
    Results,
    capture_keys,
)
from ostinato.graphs.dispatching.descriptor import recurring_shape
from ostinato.kernels.lora import NO_ADAPTER

from ..row_field import RowField
from ..scheduling.request import IntArray

RESERVED_CELLS = 2
"""Never read: padded pairs are written there."""
_LADDER = Ladder([64, 512, 4096])
_FEW = 64
"""Changes that are sorted without numpy."""


@dataclass
class _Changes:
    """Cells of the mirror that the device does not have yet; noted before the mirror is written."""

    spans: list[tuple[int, int]] = dataclass_field(default_factory=list)
    """From and to."""
    cells: list[IntArray] = dataclass_field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.spans or self.cells)

    def places(self) -> IntArray:
        """Each cell once: a scatter guarantees no order among equal places."""
        if not self.spans and len(self.cells) == 1 and len(self.cells[0]) == 1:
            return self.cells[0]  # usually a page
        count = sum(end - begin for begin, end in self.spans) + sum(map(len, self.cells))
        if count <= _FEW:
            listed = [place for span in self.spans for place in range(*span)]
            return np.array(
                sorted({*listed, *(place for each in self.cells for place in each.tolist())}), dtype=np.int64
            )
        places = self.cells
        if self.spans:
            begins, ends = np.array(self.spans, dtype=np.int64).T
            lengths = ends - begins
            offsets = np.arange(lengths.sum()) - np.repeat(lengths.cumsum() - lengths, lengths)
            places = [*places, np.repeat(begins, lengths) + offsets]
        # Sorting is several times as fast as numpy's `unique`, and the places are mostly in order already.
        ordered = np.sort(np.concatenate(places, dtype=np.int64), kind="stable")
        return ordered[np.append(True, ordered[1:] != ordered[:-1])]


class DeviceRows:
    """Per-request state at fixed addresses. Its tensors by name: `rows["lengths"]`."""

    def __init__(
        self, fields: Sequence[RowField], num_rows: int, pool: GraphPool, mode: GraphMode, warmups: int
    ) -> None:
        """`num_rows` includes the reserved row 0. With mode NONE changes are written eagerly."""
        # 64-bit fields first: their views must be aligned.
        ordered = sorted(fields, key=lambda field: -field.dtype.itemsize)
        self._fields = {field.name: field for field in ordered}
        self._starts: dict[str, int] = {}
        end = RESERVED_CELLS
        for field in ordered:
            self._starts[field.name] = end
            end += field.cells * num_rows
        self._mirror = np.zeros(end, dtype=np.int32)
        self._views = {name: self._host_view(self._fields[name], num_rows) for name in self._fields}
        for name, view in self._views.items():
            view[:] = self._fields[name].initial
        self._state = torch.from_numpy(self._mirror.copy()).to(pool.device)
        self._tensors = {name: self._device_view(self._fields[name], num_rows) for name in self._fields}
        self._changes = _Changes()
        self.scatter = self._make_scatter(mode, pool, warmups)
        """The graphs that write changes."""

    def __getitem__(self, name: str) -> torch.Tensor:
        """A field of all rows on the device."""
        return self._tensors[name]

    @property
    def advancing(self) -> tuple[torch.Tensor, ...]:
        """The fields that graphs change."""
        return tuple(self._tensors[name] for name, field in self._fields.items() if field.advances)

    @property
    def num_bytes(self) -> int:
        """Bytes on the device."""
        return self._state.nbytes

    @property
    def cells(self) -> torch.Tensor:
        """Everything on the device as int32 [cells]; the first `RESERVED_CELLS` are never read."""
        return self._state

    @contextmanager
    def unchanged(self) -> Iterator[None]:
        """Whatever is written and sent inside is undone at the end, on both sides."""
        state, mirror = self._state.clone(), self._mirror.copy()
        unsent, self._changes = self._changes, _Changes()
        try:
            yield
        finally:
            self._state.copy_(state)
            self._mirror[:] = mirror
            self._changes = unsent

    def write(self, name: str, row: int, values: float | Sequence[float], first: int = 0) -> None:
        """Set a field of a row, or of a list field the values from `first` on; sent with the next `send`."""
        field = self._fields[name]
        target = self._views[name]
        if field.width is None:
            if target[row] == values and not field.advances:
                return
            begin = self._starts[name] + row * field.cells
            self._changes.spans.append((begin, begin + field.cells))
            target[row] = values
        else:
            new = np.asarray(values, dtype=target.dtype)
            if np.array_equal(target[row, first : first + len(new)], new) and not field.advances:
                return
            size = field.cells // field.width
            begin = self._starts[name] + row * field.cells + first * size
            self._changes.spans.append((begin, begin + len(new) * size))
            target[row, first : first + len(new)] = new

    def write_rows(self, name: str, rows: IntArray, value: float) -> None:
        """Set a single 32-bit value in many rows."""
        field = self._fields[name]
        assert field.width is None
        assert field.cells == 1
        assert not field.advances
        changed = rows[self._views[name][rows] != value]
        if len(changed):
            self._changes.cells.append(self._starts[name] + changed.astype(np.int64))
            self._views[name][changed] = value

    def write_span(self, name: str, row: int, first: int, values: IntArray) -> None:
        """Set values of a 32-bit list field in a row, from `first` on; only those that differ are sent."""
        field = self._fields[name]
        assert field.width is not None
        assert field.cells == field.width
        assert not field.advances
        begin = self._starts[name] + row * field.width + first
        # A row's next request often begins as its last tenant did.
        changed = (self._mirror[begin : begin + len(values)] != values).nonzero()[0]
        if len(changed):
            self._changes.cells.append(begin + changed)
            self._mirror[begin : begin + len(values)] = values

    def write_cells(
        self,
        name: str,
        rows: Sequence[int] | IntArray,
        columns: Sequence[int] | IntArray,
        values: Sequence[int] | IntArray,
    ) -> None:
        """Set single values of a 32-bit list field in many rows; for equal places the last one counts."""
        field = self._fields[name]
        assert field.width is not None
        assert field.cells == field.width
        assert not field.advances
        cells = self._starts[name] + np.asarray(rows) * field.width + np.asarray(columns)
        changed = cells[self._mirror[cells] != values]
        if len(changed):
            self._changes.cells.append(changed)
            self._mirror[cells] = values

    def _make_scatter(self, mode: GraphMode, pool: GraphPool, warmups: int) -> CudaGraphRunner:
        return CudaGraphRunner(
            self._put,
            InputBuffers(
                (Field("places", torch.int64), Field("values", torch.int32)),
                max_tokens=_LADDER.limit,
                device=self._state.device,
                allocate=pool.allocate,
            ),
            capture_keys(mode, _LADDER, None, max_reqs=_LADDER.limit),
            dispatcher=Dispatcher(mode),
            pool=pool,
            options=CaptureOptions(warmups=warmups, freeze_gc=False),
            state={},  # padded pairs go to cells that are never read
            kernels_of=lambda key: None,
            results=Results.UNGUARDED,
        )

    def capture(self) -> None:
        """Capture the graphs that write changes."""
        self.scatter.capture(progress=False)

    def drop(self) -> None:
        """Forget those graphs."""
        self.scatter.drop()

    def send(self) -> None:
        """Send all changes to the device, after the steps launched so far.

        If that fails, all of them are sent again next time. No step runs in between, so nothing that the
        device has advanced is set back.
        """
        if not self._changes:
            return
        places = self._changes.places()
        for begin in range(0, len(places), _LADDER.limit):
            piece = places[begin : begin + _LADDER.limit]
            shape = recurring_shape(len(piece), len(piece), 1)
            self.scatter.run({"places": piece, "values": self._mirror[piece]}, shape)
        self._changes = _Changes()

    def _put(self, places: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        self._state.index_copy_(0, places, values)
        return values

    def _host_view(self, field: RowField, num_rows: int) -> IntArray:
        start = self._starts[field.name]
        kind = np.dtype(str(field.dtype).removeprefix("torch."))
        flat = self._mirror[start : start + field.cells * num_rows].view(kind)
        return flat if field.width is None else flat.reshape(num_rows, field.width)

    def _device_view(self, field: RowField, num_rows: int) -> torch.Tensor:
        start = self._starts[field.name]
        flat = self._state[start : start + field.cells * num_rows].view(field.dtype)
        return flat if field.width is None else flat.view(num_rows, field.width)


MAX_BIASES = 512
"""Tokens that one request may bias."""
MAX_BANNED = 16
"""End-of-sequence and stop tokens that min_tokens can suppress."""


def row_fields(page_columns: int, *, has_adapters: bool = False) -> tuple[RowField, ...]:
    """The fields of a row, for requests of at most `page_columns` pages."""
    real, integer = torch.float32, torch.int32
    # After all others, which then lie where they do without adapters.
    of_adapters = (RowField("adapter_slots", integer, initial=NO_ADAPTER),) if has_adapters else ()
    return (
        RowField("lengths", integer, advances=True),
        RowField("last_tokens", torch.int64, advances=True),
        RowField("page_table", integer, page_columns),
        RowField("prefix_lens", integer),
        RowField("is_plain", integer),
        RowField("temperature", real),
        RowField("top_k", integer),
        RowField("top_p", real, initial=1),
        RowField("min_p", real),
        RowField("seeds", torch.int64),
        RowField("repetition", real, initial=1),
        RowField("presence", real),
        RowField("frequency", real),
        RowField("num_biases", integer),
        RowField("bias_ids", integer, MAX_BIASES),
        RowField("bias_values", real, MAX_BIASES),
        RowField("banned", integer, MAX_BANNED, initial=-1),
        RowField("banned_before", integer),
        RowField("num_logprobs", integer, initial=-1),
        *of_adapters,
    )
