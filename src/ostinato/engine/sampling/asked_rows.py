"""The sampling parameters of requests, written into their rows when they get them: on the device, and on the
host the part that decides which graphs serve them.

Settings that most requests leave alone (biases, banned tokens, masks) are rewritten only if the row's
previous tenant had set them.

Token masks say which tokens a row may get, one bit each: on the device, with the host's copy of the same
state. They come from grammars, which are followed on the host, and from the lists of requests
(`token_rules`); they change with every token or not at all. The changed ones are sent in one copy from pinned
memory, which nothing waits for.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from ostinato.graphs import BatchShape, Field, InputBuffers
from ostinato.text.grammar import Grammar, Mask, mask_words

from ..parameters.sampling_params import SamplingParams
from ..scheduling.request import Request
from ..stepping.device_rows import MAX_BANNED, MAX_BIASES
from ..stepping.model_runner import ModelRunner
from .kinds import Kind, RowKinds


class AskedRows:
    """The sampling settings of all rows of an engine."""

    def __init__(self, runner: ModelRunner, vocab: int, *, tells_drawn: bool) -> None:
        """`tells_drawn`: see `RowKinds`."""
        self._runner, self._rows, self._vocab = runner, runner.rows, vocab
        num_rows, device = runner.config.max_rows, runner.config.device
        self.kinds = RowKinds(num_rows, tells_drawn=tells_drawn)
        self.generated = torch.zeros(num_rows, vocab, dtype=torch.int32, device=device)
        """How often each row generated each token, for rows with penalties."""
        self.in_prompt = torch.zeros(num_rows, vocab, dtype=torch.bool, device=device)
        """Whether each token is in the prompt, for the same rows."""
        self.masks = TokenMasks(num_rows, vocab, device)
        self._biased_rows: set[int] = set()
        self._banning_rows: set[int] = set()
        self._plain_rows: dict[int, tuple[float | None, ...]] = {}
        """The values written in rows whose requests use plain sampling."""

    @property
    def num_bytes(self) -> int:
        """The size of what is not in the rows themselves."""
        return self.generated.nbytes + self.in_prompt.nbytes + self.masks.num_bytes

    @contextmanager
    def unchanged(self) -> Iterator[None]:
        """Requests that join inside are undone at the end."""
        tensors = (self.generated, self.in_prompt)
        before = [tensor.clone() for tensor in tensors]
        biased, banning = set(self._biased_rows), set(self._banning_rows)
        plain = dict(self._plain_rows)
        try:
            with self.masks.unchanged(), self.kinds.unchanged():
                yield
        finally:
            for tensor, content in zip(tensors, before, strict=True):
                tensor.copy_(content)
            self._biased_rows, self._banning_rows, self._plain_rows = biased, banning, plain

    def join(self, requests: Sequence[Request]) -> None:
        """Write the settings of a step's newcomers into their rows; `rows.send` copies them to the device."""
        for request in requests:
            if request.params is not None:
                self._write(request, request.params)

    def _write(self, request: Request, params: SamplingParams) -> None:
        row, write = request.row, self._rows.write
        plain = self._plain_values(request, params)
        if plain is not None and self._plain_rows.get(row) == plain:
            self.masks.allow_all(row)
            return
        self._plain_rows.pop(row, None)  # if any of this fails, the next tenant rewrites it
        is_plain = self.kinds.set(row, params, request.is_processed) is Kind.PLAIN
        write("is_plain", row, is_plain)
        if self._runner.speculation is not None:
            self._runner.speculation.seat(request, params, is_plain=is_plain)
        write("temperature", row, 0.0 if params.is_greedy else params.temperature)
        write("top_k", row, min(max(params.top_k, 0), self._vocab))
        write("top_p", row, params.top_p)
        write("min_p", row, params.min_p)
        write("seeds", row, params.seed or 0)
        # Requests of one kind do not all use the same settings, so these are always set.
        write("repetition", row, params.repetition_penalty)
        write("presence", row, params.presence_penalty)
        write("frequency", row, params.frequency_penalty)
        self._write_biases(row, params.logit_bias or {})
        self._write_banned(row, self._banned(request, params))
        write("banned_before", row, request.num_prompt_tokens + params.min_tokens)
        from_graph = params.logprobs if self.kinds.wants_logprobs[row] else None
        write("num_logprobs", row, -1 if from_graph is None else min(from_graph, self._vocab))
        if params.has_penalties:
            self._count_tokens_of(request)
        if request.rules is not None:
            self.masks.allow(row, request.rules.lasting)
        elif request.grammar is None:
            self.masks.allow_all(row)
        if plain is not None:
            self._plain_rows[row] = plain

    def _plain_values(self, request: Request, params: SamplingParams) -> tuple[float | None, ...] | None:
        """Everything that is read of a row with plain sampling; None if the request needs more."""
        if self._runner.speculation is not None or request.rules is not None or request.grammar is not None:
            return None
        if Kind.of(params, request.is_processed) is not Kind.PLAIN:
            return None
        temperature = 0.0 if params.is_greedy else params.temperature
        return temperature, params.seed, params.top_k, params.top_p, params.min_p

    def _write_biases(self, row: int, biases: Mapping[int, float]) -> None:
        if not biases and row not in self._biased_rows:
            return
        self._biased_rows.add(row)  # if any of this fails, the next tenant rewrites it
        tokens, rest = sorted(biases), MAX_BIASES - len(biases)
        self._rows.write("num_biases", row, len(tokens))
        self._rows.write("bias_ids", row, [*tokens, *[0] * rest])
        self._rows.write("bias_values", row, [*[biases[token] for token in tokens], *[0.0] * rest])
        if not biases:
            self._biased_rows.remove(row)

    def _write_banned(self, row: int, banned: Sequence[int]) -> None:
        if not banned and row not in self._banning_rows:
            return
        self._banning_rows.add(row)  # as with biases
        self._rows.write("banned", row, [*banned, *[-1] * (MAX_BANNED - len(banned))])
        if not banned:
            self._banning_rows.remove(row)

    def _banned(self, request: Request, params: SamplingParams) -> list[int]:
        if not params.min_tokens:
            return []
        eos = () if params.ignore_eos else tuple(request.eos_token_ids)
        ids = {*eos, *(params.stop_token_ids or ())}
        return [token for token in ids if token < self._vocab][:MAX_BANNED]

    def _count_tokens_of(self, request: Request) -> None:
        row, device = request.row, self.generated.device
        self.generated[row] = 0
        self.in_prompt[row] = False
        prompt = torch.tensor(request.prompt_ids, dtype=torch.int64, device=device)
        self.in_prompt[row].index_fill_(0, prompt, True)
        output = torch.tensor(request.output_ids, dtype=torch.int64, device=device)
        self.generated[row].index_add_(0, output, torch.ones_like(output, dtype=torch.int32))


_ALL = -1
"""A word with all bits set: every token is allowed."""


class TokenMasks:
    """The masks of all rows; row 0, which belongs to padding, allows everything."""

    def __init__(self, num_rows: int, vocab_size: int, device: torch.device) -> None:
        words = mask_words(vocab_size)
        self._vocab_size = vocab_size
        self.tensor = torch.full((num_rows, words), _ALL, dtype=torch.int32, device=device)
        """int32 [num_rows, words], on the device."""
        self._mirror: Mask = np.full((num_rows, words), _ALL, dtype=np.int32)
        self._masked: set[int] = set()
        self._unsent: set[int] = set()
        self._buffers = InputBuffers(
            (Field("rows", torch.int64), Field("masks", torch.int32, (words,))),
            max_tokens=num_rows,
            device=device,
        )

    @property
    def num_bytes(self) -> int:
        """Bytes on the device."""
        return self.tensor.nbytes + self._buffers.bytes

    @contextmanager
    def unchanged(self) -> Iterator[None]:
        """Masks set inside are undone at the end."""
        tensor, mirror = self.tensor.clone(), self._mirror.copy()
        masked, unsent = set(self._masked), set(self._unsent)
        try:
            yield
        finally:
            self.tensor.copy_(tensor)
            self._mirror[:] = mirror
            self._masked, self._unsent = masked, unsent

    def follow(self, row: int, grammar: Grammar, within: Mask | None = None) -> bool:
        """Allow a row only the next tokens of a grammar that are also in `within`; on the device after the
        next `send`. False, and nothing changes, if there is none."""
        mask = np.empty_like(self._mirror[row])
        grammar.fill(mask)
        return self.allow(row, mask if within is None else mask & within)

    def allow(self, row: int, mask: Mask) -> bool:
        """Allow a row only these tokens; as `follow`."""
        if not mask.any():
            return False
        self._masked.add(row)
        self._set(row, mask)
        return True

    def allowed(self, row: int) -> np.ndarray[Any, np.dtype[np.bool_]]:
        """bool, one per token: what the row may get, as the host knows it."""
        octets = self._mirror[row].view(np.uint8)
        return np.unpackbits(octets, bitorder="little", count=self._vocab_size).view(np.bool_)

    def allow_all(self, row: int) -> None:
        """Allow a row everything; on the device after the next `send`."""
        if row in self._masked:
            self._set(row, _ALL)
            self._masked.remove(row)

    def _set(self, row: int, mask: Mask | int) -> None:
        if not np.array_equal(self._mirror[row], np.broadcast_to(mask, self._mirror[row].shape)):
            self._unsent.add(row)  # before the mirror is written: if that fails, it is sent
            self._mirror[row] = mask

    def send(self) -> None:
        """Send changes to the device, after the steps launched so far; if it fails, the next call does."""
        if not self._unsent:
            return
        rows = np.array(sorted(self._unsent), dtype=np.int64)
        shape = BatchShape.decode(len(rows))
        descriptor = shape.as_descriptor()
        self._buffers.fill({"rows": rows, "masks": self._mirror[rows]}, shape, descriptor)
        sent = self._buffers.views(descriptor)
        self.tensor.index_copy_(0, sent["rows"], sent["masks"])
        self._unsent = set()
