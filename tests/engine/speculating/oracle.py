"""A drafter that knows what comes next, and is wrong where it is told to be: every acceptance length
occurs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from ostinato.engine.llm import LLM
from ostinato.engine.parameters.sampling_params import SamplingParams
from ostinato.engine.scheduling.request import Request
from ostinato.engine.speculating import speculation as making
from ostinato.engine.speculating.config import SpeculativeConfig
from ostinato.engine.speculating.ngram_drafter import NgramDrafter
from ostinato.engine.stepping.model_runner import ModelRunner
from ostinato.graphs import BatchDescriptor

Ids = tuple[int, ...]


def key_of(prompt: Sequence[int], params: SamplingParams | None) -> tuple[Ids, float, int | None]:
    """Requests with the same one get the same tokens, as far as they go."""
    heat, seed = (params.temperature, params.seed) if params is not None else (0.0, None)
    return tuple(int(token) for token in prompt), heat, seed


class Oracle(NgramDrafter):
    """Reads drafts from `future`; at positions that are `wrong` it drafts another token."""

    known: dict[tuple[Ids, float, int | None], list[int]]
    """What follows a prompt."""
    wrong: Tensor
    """bool [positions]."""

    def __init__(self, runner: ModelRunner, config: SpeculativeConfig) -> None:
        self.future = torch.zeros_like(runner.rows["history"], dtype=torch.int64)
        self.known, self.wrong = {}, torch.zeros_like(self.future[0], dtype=torch.bool)
        self._vocab = runner.logits.size(1)
        super().__init__(runner, config)

    def join(self, requests: Sequence[Request]) -> None:
        super().join(requests)
        for request in requests:
            text = [
                *request.prompt_ids.tolist(),
                *self.known.get(key_of(request.prompt_ids, request.params), ()),
            ]
            self.future[request.row, : len(text)] = torch.tensor(text, device=self.future.device)

    def _draft(self, req_rows: Tensor, descriptor: BatchDescriptor) -> tuple[()]:
        super()._draft(req_rows, descriptor)
        assert descriptor.query_len is not None
        ahead = torch.arange(1, 1 + descriptor.query_len, device=req_rows.device)
        places = self._rows["lengths"].index_select(0, req_rows).long().unsqueeze(1) + ahead
        places = places.clamp(max=self.future.size(1) - 1)
        drafts = self.future.index_select(0, req_rows).gather(1, places)
        drafts = torch.where(self.wrong[places], (drafts + 1) % self._vocab, drafts)
        real = (req_rows != 0).unsqueeze(1)
        self._rows["drafts"][:, : descriptor.query_len].index_copy_(0, req_rows.long(), (drafts * real).int())
        return ()


@contextmanager
def oracle_llm(directory: str, num_drafts: int, **options: Any) -> Iterator[tuple[LLM, Oracle]]:
    """An engine whose drafts come from an oracle."""
    asked = {"method": "ngram", "num_speculative_tokens": num_drafts, "disable_adaptive": True}
    asked |= options.pop("speculative_config", {})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(making, "NgramDrafter", Oracle)
        llm = LLM(directory, speculative_config=asked, **options)
    with llm:
        speculation = llm.engine.core.runner.speculation
        assert speculation is not None
        assert isinstance(speculation.drafter, Oracle)
        yield llm, speculation.drafter
