"""Drafts from the text itself: what followed an earlier occurrence of the last tokens. No model is used."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ostinato.graphs import BatchDescriptor
from ostinato.kernels.attention.batch import AttentionBatch
from ostinato.kernels.decode_inputs.request_rows import note_time
from ostinato.kernels.speculation.ngram import draft_ngram

from ..scheduling.request import IntArray, Request
from .config import SpeculativeConfig, draft_tiers
from .row_graphs import HeldRows, row_graphs
from .target import Target


class NgramDrafter:
    """Keeps the text of every row on the device, and looks for its last tokens in it."""

    tapped_layers: tuple[int, ...] = ()

    def __init__(self, runner: Target, config: SpeculativeConfig) -> None:
        self._config = config
        self._rows = runner.rows
        self._began = runner.began
        self.history = runner.rows["history"]
        """int32 [max_rows, positions]: the text of each row."""
        self.graphs = row_graphs(
            runner,
            self._draft,
            draft_tiers(config),
            most=runner.config.max_drafts,
            kernels_of=lambda key: key.descriptor.query_len,
        )
        self._held = HeldRows(self.graphs)

    def named_tensors(self) -> dict[str, Tensor]:
        """Nothing beyond rows."""
        return {}

    def join(self, requests: Sequence[Request]) -> None:
        """Write the tokens that no step computes: those whose pages were found in the cache."""
        for request in requests:
            if count := request.num_computed:
                self._rows.write("history", request.row, request.first_tokens(count).tolist())

    def run(self, rows: IntArray, num_drafts: int) -> None:
        """Launch that many drafts for each of these rows."""
        self._held.run(rows, num_drafts)

    def catch_up(self, rows: IntArray) -> None:
        """Nothing to do: acceptance has recorded everything."""

    def note_step(
        self, input_ids: Tensor, batch: AttentionBatch, features: Tensor, descriptor: BatchDescriptor
    ) -> None:
        """Keep the tokens of a step; when drafts are verified, acceptance keeps those that it takes."""
        if descriptor.query_len is not None and descriptor.query_len > 1:
            return
        # Padding writes to row 0, which is never read.
        places = batch.token_rows.long() * self.history.size(1) + batch.positions
        self.history.view(-1).index_copy_(0, places, input_ids.int())

    def try_out(self) -> None:
        """Run the kernels once for each number of drafts."""
        for key in {key.descriptor.query_len: key for key in self.graphs.keys}.values():
            self.graphs.try_out(key)

    def _draft(self, req_rows: Tensor, descriptor: BatchDescriptor) -> tuple[()]:
        assert descriptor.query_len is not None
        rows, config = self._rows, self._config
        note_time(self._began)
        draft_ngram(
            req_rows,
            descriptor.query_len,
            rows["lengths"],
            rows["last_tokens"],
            self.history,
            rows["drafts"],
            config.prompt_lookup_min,
            config.prompt_lookup_max,
            self.history.size(1),
        )
        return ()
