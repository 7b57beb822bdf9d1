"""Speculation's kernels against Python that works on lists, for torch, Triton's interpreter and a GPU."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from ostinato.kernels.sampling import torch_reference
from ostinato.kernels.sampling.plain import PlainSettings
from ostinato.kernels.sampling.token_lines import LINE_HEAD, TokenLines
from ostinato.kernels.speculation import chains, ngram, verification
from ostinato.kernels.speculation.state import NO_TOKEN, SpecState
from ostinato.kernels.speculation.verification import verified_line

MAX_ROWS = 9
Device = torch.device | str


class Ops(NamedTuple):
    """What is checked."""

    begin_verify: Callable[..., Any]
    accept: Callable[..., Any]
    draft_ngram: Callable[..., Any]
    note_history: Callable[..., Any]
    chain_start: Callable[..., Any]
    chain_next: Callable[..., Any]
    note_best: Callable[..., Any]


BY_DEVICE = Ops(
    verification.begin_verify,
    verification.accept,
    ngram.draft_ngram,
    ngram.note_history,
    chains.chain_start,
    chains.chain_next,
    chains.note_best,
)
"""Whatever the device has."""


def looked_up(text: list[int], k: int, min_n: int, max_n: int) -> list[int]:
    """The definition of n-gram drafts."""
    for n in range(min(max_n, len(text) - 1), min_n - 1, -1):
        for end in range(len(text) - 1, n - 1, -1):
            if text[end - n : end] == text[len(text) - n :]:
                follows = list(text)
                while len(follows) < end + k:
                    follows.append(follows[end + len(follows) - len(text)])
                return follows[end : end + k]
    return text[-1:] * k


def check_ngram(device: Device, seed: int, ops: Ops = BY_DEVICE) -> None:
    """Any texts, rows with padding among them; what was noted before is not needed at position L."""
    pick = random.Random(seed)
    width, k, most = pick.choice([8, 40, 300]), pick.randint(1, 5), pick.choice([1, 2, 3, 4, 5, 12])
    least = pick.randint(1, most)
    rows = [*pick.sample(range(1, MAX_ROWS), 4), 0, 0]
    texts = {row: _text(pick, width) for row in rows if row}
    history = torch.randint(0, 4, (MAX_ROWS, width + 3), dtype=torch.int32)
    lengths, last = torch.zeros(MAX_ROWS, dtype=torch.int32), torch.zeros(MAX_ROWS, dtype=torch.int64)
    for row, text in texts.items():
        lengths[row], last[row] = len(text) - 1, text[-1]
        history[row, : len(text) - 1] = torch.tensor(text[:-1], dtype=torch.int32)
    drafts = torch.full((MAX_ROWS, 6), 77)
    moved = [tensor.to(device) for tensor in (lengths, last, history, drafts)]
    picked = torch.tensor(rows, dtype=torch.int32, device=device)
    ops.draft_ngram(picked, k, *moved, least, most, width)
    assert torch.equal(moved[0].cpu(), lengths)
    found, noted = moved[3].cpu(), moved[2].cpu()
    for row in range(1, MAX_ROWS):
        if row in texts:
            wanted = looked_up(texts[row], k, least, most)
            assert found[row].tolist() == wanted + [77] * (6 - k), (texts[row], least, most)
            assert noted[row, : len(texts[row])].tolist() == texts[row]
        else:
            assert found[row].tolist() == [77] * 6
            assert torch.equal(noted[row], history[row])
    assert torch.equal(noted[0], history[0])


def _text(pick: random.Random, width: int) -> list[int]:
    if pick.random() < 0.3:
        period = pick.randint(1, 6)
        return [(i % period) for i in range(pick.randint(1, width))]
    return [pick.randrange(pick.choice([2, 4, 30])) for _ in range(pick.randint(1, width))]


def check_note_history(device: Device, ops: Ops = BY_DEVICE) -> None:
    """The token at L is entered; of padding and behind the last place nothing is."""
    history = torch.arange(MAX_ROWS * 5, dtype=torch.int32).view(MAX_ROWS, 5)
    lengths = torch.tensor([0, 4, 5, 0, 2, 1, 1, 1, 1], dtype=torch.int32)
    last = torch.arange(MAX_ROWS) + 100
    wanted = history.clone()
    wanted[1, 4], wanted[3, 0], wanted[4, 2] = 101, 103, 104
    moved = history.to(device)
    rows = torch.tensor([3, 1, 0, 2, 4, 0], dtype=torch.int32, device=device)
    ops.note_history(rows, lengths.to(device), last.to(device), moved)
    assert torch.equal(moved.cpu(), wanted)


def check_begin_verify(device: Device, num_requests: int, q: int, ops: Ops = BY_DEVICE) -> None:
    """Tokens of a request lie side by side; padding has no tokens, and nothing is changed."""
    lengths = torch.tensor([0, 7, 3, 100, 1, 15, 30, 2, 9], dtype=torch.int32)
    last, drafts = torch.arange(MAX_ROWS) + 50, torch.randint(0, 99, (MAX_ROWS, 5))
    rows = ([3, 1, 5, 8, 2, 6] + [0] * num_requests)[:num_requests]
    if num_requests > 1:
        rows[-1] = 0
    began = torch.zeros(1, dtype=torch.int64, device=device)
    moved = [tensor.to(device) for tensor in (lengths, last, drafts)]
    given = torch.tensor(rows, dtype=torch.int32, device=device)
    found = [part.cpu() for part in ops.begin_verify(given, q, *moved, began)]
    assert [part.dtype for part in found] == [torch.int64] * 2 + [torch.int32] * 4
    ids, positions, token_rows, seq_lens, starts, query_lens = (part.tolist() for part in found)
    for r, row in enumerate(rows):
        mine = slice(r * q, r * q + q)
        assert token_rows[mine] == [row] * q
        assert starts[r] == r * q
        if not row:
            assert (ids[mine], positions[mine], seq_lens[r], query_lens[r]) == ([0] * q, [0] * q, 1, 0)
            continue
        length = int(lengths[row])
        assert ids[mine] == [int(last[row]), *drafts[row, : q - 1].tolist()]
        assert positions[mine] == list(range(length, length + q))
        assert (seq_lens[r], query_lens[r]) == (length + q, q)
    for before, after in zip((lengths, last, drafts), moved, strict=True):
        assert torch.equal(before, after.cpu())
    assert (began.item() > 0) == began.is_cuda
    again = ops.begin_verify(given, q, *moved, None)
    assert all(torch.equal(one.cpu(), other) for one, other in zip(again, found, strict=True))


def check_chain(device: Device, seed: int, ops: Ops = BY_DEVICE) -> None:
    """Rows that are any number of tokens behind."""
    pick = random.Random(seed)
    num_drafts = pick.randint(1, 5)
    width, offset, num_features = num_drafts + 1, pick.randint(0, 1), num_drafts + 1
    rows = [*pick.sample(range(1, MAX_ROWS), pick.randint(1, 6)), *([0] * pick.randint(0, 3))]
    lengths = torch.randint(width + 1, 60, (MAX_ROWS,), dtype=torch.int32)
    base = lengths - torch.randint(1, width + 1, (MAX_ROWS,), dtype=torch.int32)
    lengths[0] = base[0] = 0
    last, drafts = torch.arange(MAX_ROWS) + 500, torch.randint(0, 99, (MAX_ROWS, num_drafts))
    given = torch.tensor(rows, dtype=torch.int32, device=device)
    moved = [tensor.to(device) for tensor in (lengths, last, drafts, base)]
    start = ops.chain_start(given, width, offset, *moved, num_features)
    found = chains.ChainStart(*(part.cpu().tolist() for part in start))
    for r, row in enumerate(rows):
        mine, length = slice(r * width, (r + 1) * width), int(lengths[row])
        texts = [int(last[row])]
        at = length - 1
        while row and at > base[row] and len(texts) < width:
            texts.insert(0, int(drafts[row, max(0, at - int(base[row]) - 1)]))
            at -= 1
        count = len(texts) if row else 0
        first = length - len(texts) + 1
        unused = [0] * (width - count)
        assert found.input_ids[mine] == texts[:count] + unused
        assert found.positions[mine] == [first + i - offset for i in range(count)] + unused
        assert found.token_rows[mine] == [row] * count + unused
        behind = [max(0, min(first + i - int(base[row]) - 1, num_features - 1)) for i in range(count)]
        assert found.features[mine] == [row * num_features + place for place in behind] + unused
        assert found.seq_lens[r] == (length + 1 - offset if row else 1)
        assert (found.query_starts[r], found.query_lens[r]) == (r * width, count)
        assert found.ends[r] == r * width + max(count - 1, 0)
    positions, seq_lens, query_lens = (part.tolist() for part in ops.chain_next(given, moved[0], 3 - offset))
    assert positions == [int(lengths[row]) + 3 - offset if row else 0 for row in rows]
    assert seq_lens == [position + 1 for position in positions]
    assert query_lens == [int(row != 0) for row in rows]


def check_best_draft(device: Device, vocab: int, ops: Ops = BY_DEVICE) -> None:
    """The first of equal ones; ids of the target where the draft has fewer."""
    logits = torch.randn(4, vocab, generator=torch.Generator().manual_seed(vocab))
    logits[1, vocab - 1] = logits[1, vocab // 2] = 9.0
    rows = torch.tensor([3, 1, 0, 5], dtype=torch.int32)
    offsets = torch.randint(0, 1000, (vocab,))
    best = logits.argmax(-1)
    best[1] = vocab // 2
    for given in (None, offsets):
        drafts = torch.full((MAX_ROWS, 4), 7, dtype=torch.int32, device=device)
        wanted = (best if given is None else best + given[best]) * (rows != 0)
        moved = None if given is None else given.to(device)
        found = ops.note_best(logits.to(device), rows.to(device), 2, drafts, moved)
        assert found.dtype == torch.int64
        assert found.tolist() == wanted.tolist()
        noted = torch.full((MAX_ROWS, 4), 7, dtype=torch.int32)
        noted[rows[rows != 0].long(), 2] = wanted[rows != 0].int()
        noted[0] = drafts[0].cpu()
        assert torch.equal(drafts.cpu(), noted)


@dataclass
class AcceptCase:
    """Requests whose drafts are right in some places."""

    logits: torch.Tensor
    rows: torch.Tensor
    q: int
    settings: PlainSettings
    state: SpecState
    lines: TokenLines
    drawn: list[list[int]]
    """By request and position; of requests that are not plain 0."""

    @classmethod
    def random(cls, device: Device, num_requests: int, q: int, vocab: int, seed: int) -> AcceptCase:
        """Greedy, random and passed-over requests in any rows, and padding."""
        pick, generator = random.Random(seed), torch.Generator().manual_seed(seed)
        max_rows = num_requests + 4
        rows = pick.sample(range(1, max_rows), num_requests)
        if num_requests > 2:
            rows[pick.randrange(num_requests)] = rows[-1] = 0
        picked = torch.tensor(rows, dtype=torch.int32)
        logits = torch.randn(q * num_requests, vocab, generator=generator)
        heat = torch.tensor([pick.choice([0.0, 0.8, 1.5]) for _ in range(max_rows)])
        is_plain = torch.tensor([0] + [pick.choice([1, 1, 1, 0]) for _ in range(max_rows - 1)]).int()
        seeds = torch.randint(-(1 << 63), (1 << 63) - 1, (max_rows,), generator=generator)
        lengths = torch.randint(1, 50, (max_rows,), generator=generator, dtype=torch.int32)
        lengths[0] = 0
        drafts = torch.randint(0, vocab, (max_rows, 6), generator=generator)
        limits = torch.tensor([pick.choice([6, 6, 6, 1, 2]) for _ in range(max_rows)]).int() * is_plain
        drawn = []
        for r, row in enumerate(rows):
            mine = logits[r::num_requests]
            places = (torch.full((q,), int(lengths[row])) + 1 + torch.arange(q)).int()
            asked = heat[row].expand(q), seeds[row].expand(q), places
            tokens = torch_reference.sample_unfiltered(mine, *asked).tolist()
            drawn.append(tokens if is_plain[row] else [0] * q)
            for i in range(pick.randint(0, q) if row else 0):
                drafts[row, i] = drawn[r][i]
        history = torch.full((max_rows, 52), -5, dtype=torch.int32)
        last, accepted = torch.arange(max_rows) * 3, torch.arange(max_rows, dtype=torch.int32)
        state = SpecState(lengths, last, drafts, accepted, limits, history)
        state = SpecState(*(each.to(device) for each in state if each is not None))
        settings = PlainSettings(is_plain.to(device), heat.to(device), seeds.to(device), state.lengths)
        began = torch.full((1,), 77, dtype=torch.int64, device=device)
        lines = TokenLines.of(state.last_tokens, began, num_requests * 8 + 3, 3)
        return cls(logits.to(device), picked.to(device), q, settings, state, lines, drawn)

    def check(self, ops: Ops = BY_DEVICE, synthetic: torch.Tensor | None = None, step: int = 0) -> list[int]:
        """The numbers of accepted drafts."""
        rows, q, count = self.rows.tolist(), self.q, self.rows.size(0)
        before = [each.cpu().clone() for each in self.state if each is not None]
        lengths, last, drafts, accepted, limits, history = before
        ops.accept(self.logits, self.rows, q, self.settings, self.state, synthetic, self.lines)
        if self.logits.is_cuda:
            torch.cuda.synchronize()
        numbers = []
        wanted = torch.full((verified_line(count, q),), NO_TOKEN)
        for r, row in enumerate(rows):
            tokens, guesses = list(self.drawn[r]), drafts[row].tolist()
            a = 0
            if synthetic is None:
                while a < q - 1 and a < limits[row] and guesses[a] == tokens[a]:
                    a += 1
            else:
                seed, place = ~self.settings.seeds[row].cpu(), lengths[row] + 1
                chance = torch_reference.uniform(seed.view(1), place.view(1), 1)
                while a < q - 1 and a < limits[row] and chance < synthetic[a].cpu():
                    tokens[a] = guesses[a]
                    a += 1
            wanted[r] = tokens[0]
            wanted[count + r] = 0 if row == 0 else a + 1
            for i in range(1, a + 1 if row else 0):
                wanted[count + i * count + r] = tokens[i]
            if not row:
                continue
            numbers.append(a)
            place = int(lengths[row])
            lengths[row], last[row], accepted[row] = place + 1 + a, tokens[a], a
            for i in range(a + 1):
                if place + 1 + i < history.size(1):
                    history[row, place + 1 + i] = tokens[i]
        line = self.lines.ring[step % 3].tolist()
        wanted[:count][self.rows.cpu() == 0] = torch.tensor(line[LINE_HEAD : LINE_HEAD + count])[
            self.rows.cpu() == 0
        ]
        assert line[LINE_HEAD : LINE_HEAD + len(wanted)] == wanted.tolist()
        assert line[0] == step
        assert line[3] == 0
        assert self.lines.counts.tolist() == [step + 1, 0]
        if self.logits.is_cuda:
            assert line[1] == 77
            assert line[2] > 77
        for expected, found in zip(
            (lengths, last, drafts, accepted, limits, history), self.state, strict=True
        ):
            assert found is not None
            assert torch.equal(found.cpu(), expected)
        return numbers


def check_accept(
    device: Device, num_requests: int, q: int, vocab: int, seed: int, ops: Ops = BY_DEVICE
) -> list[int]:
    """By comparison and by chance; the case's accepted numbers."""
    numbers = AcceptCase.random(device, num_requests, q, vocab, seed).check(ops)
    rates = torch.tensor([0.9, 0.6, 0.5, 0.5, 0.1, 0.0], device=device)
    numbers += AcceptCase.random(device, num_requests, q, vocab, seed).check(ops, rates)
    return numbers
