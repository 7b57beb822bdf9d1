"""One step as the scheduler decides it and as it comes back; for scheduler, runner and sampler."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from .request import IntArray, Request

PLACEHOLDER = -1
"""Stands for a token id that only the device knows so far."""


class PageUpdate(NamedTuple):
    """Entries of the page table that change: row `row`, from column `first` on."""

    row: int
    first: int
    pages: IntArray


@dataclass(frozen=True, eq=False)
class ScheduledStep:
    """One step: R requests, decoding ones first, with their tokens flattened in this order.

    Everything in it is as of its scheduling; requests may have advanced by the time it is complete.
    """

    index: int
    """Counts the steps."""
    requests: tuple[Request, ...]
    """The R requests; the very same tuple as in the step before while nothing changes."""
    rows: IntArray
    """int32 [R]: their rows."""
    starts: IntArray
    """int32 [R]: position of each request's first token in this step."""
    num_new_tokens: IntArray
    """int32 [R]: tokens of each request in this step."""
    samples: IntArray
    """bool [R]: whether a token is sampled; not for the earlier chunks of a prompt, nor for embeddings."""
    prompt_tokens: tuple[IntArray, ...]
    """The tokens of the requests that do not decode, which come last."""
    joined: tuple[Request, ...]
    """Requests that got a row for this step: their sampling state must be uploaded."""
    page_updates: tuple[PageUpdate, ...]
    """Changes of the page table since the last step, in order, to be applied before it runs."""
    tenancies: IntArray
    """int64 [R]: the tenancy of each row, see RequestRows."""
    shared_prefix: int = 0
    """Tokens that all requests of a decode step begin with, in the same pages; 0 if not looked up."""
    num_adapters: int = 0
    """Different adapters of its requests."""
    num_drafts: int = 0
    """Drafts verified after each request's last token; 0 if a prompt is computed."""

    @property
    def items(self) -> list[tuple[Request, int]]:
        """The requests with their numbers of tokens. O(R)."""
        return list(zip(self.requests, self.num_new_tokens.tolist(), strict=True))

    @property
    def num_requests(self) -> int:
        """R."""
        return len(self.requests)

    @property
    def is_uniform_decode(self) -> bool:
        """Every request continues from its last sampled token: all that the step needs is on the device."""
        return not self.prompt_tokens

    @property
    def total_tokens(self) -> int:
        """T."""
        num_decodes = self.num_requests - len(self.prompt_tokens)
        return num_decodes * self.query_len + sum(map(len, self.prompt_tokens))

    @property
    def input_ids(self) -> IntArray:
        """int64 [T]: the tokens; PLACEHOLDER where the device must take the row's last token, and for its
        draft i, counted from 1, PLACEHOLDER - i."""
        num_decodes = self.num_requests - len(self.prompt_tokens)
        if self.num_requests == len(self.prompt_tokens) == 1:
            return self.prompt_tokens[0].astype(np.int64)
        if not num_decodes:
            return np.concatenate(self.prompt_tokens, dtype=np.int64)
        each = PLACEHOLDER - np.arange(self.query_len, dtype=np.int64)
        return np.concatenate([np.tile(each, num_decodes), *self.prompt_tokens], dtype=np.int64)

    @property
    def query_len(self) -> int:
        """Tokens of each request that decodes."""
        return 1 + self.num_drafts

    @property
    def is_steady(self) -> bool:
        """Whether the device needs nothing from the host: all decode, no request joined, no new page."""
        return self.is_uniform_decode and not self.joined and not self.page_updates

    @property
    def wants_states(self) -> bool:
        """Whether a request needs the hidden states of all of a prompt's tokens."""
        prompts = self.requests[self.num_requests - len(self.prompt_tokens) :]
        return any(each.params is None or each.params.prompt_logprobs is not None for each in prompts)

    @cached_property
    def seq_lens(self) -> IntArray:
        """int32 [R]: context lengths, this step's tokens included."""
        return self.starts + self.num_new_tokens

    @property
    def query_starts(self) -> IntArray:
        """int32 [R]: index of each request's first token in the flattened batch."""
        if self.num_requests == 1:
            return np.zeros(1, dtype=np.int32)
        starts: IntArray = self.num_new_tokens.cumsum(dtype=np.int32) - self.num_new_tokens
        return starts

    @property
    def token_rows(self) -> IntArray:
        """int32 [T]: the row of each token."""
        return self.rows.repeat(self.num_new_tokens)

    @property
    def positions(self) -> IntArray:
        """int64 [T]: the position of each token in its request."""
        if self.num_requests == 1:
            start = self.starts.item()
            return np.arange(start, start + self.total_tokens)
        first = (self.starts - self.query_starts).repeat(self.num_new_tokens)
        return first + np.arange(self.total_tokens)


class FurtherTokens(NamedTuple):
    """One more token of some requests of a step that verified drafts."""

    tokens: IntArray
    """[R]"""
    accepted: IntArray
    """bool [R]: which requests got one."""
    finished: tuple[Request, ...]
    """Requests that ended with it."""


@dataclass(frozen=True, eq=False)
class CompletedStep:
    """The results of a step."""

    step: ScheduledStep
    tokens: IntArray
    """[R]: the sampled tokens as they came from the device."""
    accepted: IntArray
    """bool [R]: which of them became part of their request's output."""
    finished: tuple[Request, ...]
    """Requests that ended with these tokens."""
    further: tuple[FurtherTokens, ...] = ()
    """The tokens after these if drafts were accepted, one after another."""

    def new_tokens(self) -> Iterator[tuple[Request, int]]:
        """Each request that got a token, with the token, in order. O(R)."""
        for tokens, accepted in ((self.tokens, self.accepted), *(each[:2] for each in self.further)):
            for at in np.flatnonzero(accepted).tolist():
                yield self.step.requests[at], int(tokens[at])
