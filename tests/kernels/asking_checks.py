"""Checks of sampling for requests that ask for more, for the interpreter and for a GPU."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kernels.asked_rows import MOST_BANNED, MOST_BIASES, nothing_asked
from kernels.filter_checks import Filtering
from kernels.small_kernel_checks import PlainCase
from ostinato.kernels.sampling import asking_rows
from ostinato.kernels.sampling.asked import Asked
from ostinato.kernels.sampling.token_lines import LINE_HEAD, LogprobLines, TokenLines
from ostinato.kernels.speculation import verification

MOST_TOP = 5


@dataclass(frozen=True)
class AskingCase:
    """Requests that ask for anything, in any rows and at any places of a step."""

    logits: Tensor
    """float32 [R, vocab]: of all requests of the step."""
    rows: Tensor
    places: Tensor
    asked: Asked

    @classmethod
    def random(cls, logits: Tensor, num_asking: int, seed: int, *, has_filters: bool = True) -> "AskingCase":
        """Whatever can be asked for may be asked for or not; every fifth request is padding."""
        draw = torch.Generator().manual_seed(seed)
        num_requests, vocab = logits.shape
        n = num_asking + 3

        def integers(low: int, high: int, *shape: int) -> Tensor:
            return torch.randint(low, high, shape, generator=draw)

        def one_of(*values: float) -> Tensor:
            return torch.tensor(values)[integers(0, len(values), n)]

        def some(*shape: int) -> Tensor:
            return torch.rand(*shape, generator=draw) < 0.5

        filters = Filtering.random(torch.zeros(n, vocab), seed)
        off = {"top_k": filters.top_k * 0, "top_p": filters.top_p * 0 + 1, "min_p": filters.min_p * 0}
        filters = filters if has_filters else replace(filters, **off)
        num_biases = integers(0, min(MOST_BIASES, vocab) + 1, n) * some(n)
        width = min(MOST_BIASES, vocab)
        ids = torch.stack([torch.randperm(vocab, generator=draw)[:width] for _ in range(n)])
        ids = torch.nn.functional.pad(ids, (0, MOST_BIASES - width))
        counts = torch.arange(MOST_BIASES) < num_biases.unsqueeze(1)
        ids = torch.where(counts, ids, vocab).sort(1).values
        banned = torch.where(some(n, MOST_BANNED), integers(0, vocab, n, MOST_BANNED), -1)
        allowed = (torch.rand(n, -(-vocab // 32), 32, generator=draw) < 0.7) | ~some(n, 1, 1)
        allowed[:, 0, 0] = True  # somebody must be left
        banned[banned == 0] = -1
        words = (allowed.long() << torch.arange(32)).sum(-1)
        asked = Asked(
            temperature=filters.temperature,
            seeds=integers(-(2**62), 2**62, n),
            lengths=integers(1, 60, n).int(),
            top_k=filters.top_k,
            top_p=filters.top_p,
            min_p=filters.min_p,
            repetition=one_of(1.0, 1.0, 1.4, 0.7),
            presence=one_of(0.0, 0.0, 0.8),
            frequency=one_of(0.0, 0.0, 0.4, -0.5),
            num_biases=num_biases.int(),
            bias_ids=torch.where(counts, ids, 0).int(),
            bias_values=torch.where(counts, 3 * torch.randn(n, MOST_BIASES, generator=draw), 0.0),
            banned=banned.int(),
            banned_before=integers(0, 60, n).int(),
            num_logprobs=one_of(-1, -1, 0, min(2, vocab), min(MOST_TOP, vocab)).int(),
            generated=(integers(0, 3, n, vocab) * (torch.rand(n, vocab, generator=draw) < 0.3)).int(),
            in_prompt=torch.rand(n, vocab, generator=draw) < 0.2,
            masks=torch.where(words >= 2**31, words - 2**32, words).int(),
        )
        rows = (torch.randperm(n - 1, generator=draw)[:num_asking] + 1).int()
        rows[4::5] = 0
        places = torch.randperm(num_requests, generator=draw)[:num_asking].int()
        return cls(logits, rows, places, asked)

    def to(self, device: torch.device | str) -> "AskingCase":
        """The same on another device."""
        asked = Asked(*(tensor.to(device) for tensor in self.asked))
        return AskingCase(self.logits.to(device), self.rows.to(device), self.places.to(device), asked)

    def operands(self) -> tuple[Tensor, Tensor, Tensor, Asked]:
        """As functions take them."""
        return self.logits, self.rows, self.places, self.asked

    def one_by_one(self) -> Iterator["AskingCase"]:
        """Each request without the others."""
        for at in range(len(self.rows)):
            yield replace(self, rows=self.rows[at : at + 1], places=self.places[at : at + 1])

    def lines(self) -> tuple[TokenLines, LogprobLines]:
        """Behind plain sampling, which said 7 for everybody."""
        device, num_requests = self.logits.device, self.logits.size(0)
        last_tokens = torch.full((self.asked.seeds.size(0),), 9, device=device)
        lines = TokenLines.of(last_tokens, torch.full_like(last_tokens[:1], 77), num_requests, 3)
        lines.counts[0] = 5
        lines.ring[4 % 3] = torch.tensor([4, 77 if lines.counts.is_cuda else 0, 0, 0, *[7] * num_requests])
        return lines, LogprobLines.of(lines, min(MOST_TOP, self.logits.size(1)))

    def sampled(self, *, by_kernels: bool, has_filters: bool = True) -> "Amended":
        """What is left of it: on a GPU, or by kernels in the interpreter, or by the reference."""
        asked = self.asked._replace(generated=self.asked.generated.clone())
        lines, logprobs = self.lines()
        sample = asking_rows.by_kernels if by_kernels else asking_rows.reference
        sample(self.logits, self.rows, self.places, asked, lines, logprobs, has_filters)
        return self.amended(asked, lines, logprobs)

    def amended(self, asked: Asked, lines: TokenLines, logprobs: LogprobLines) -> "Amended":
        """All that may have changed, on the CPU."""
        if lines.counts.is_cuda:
            torch.cuda.synchronize()
        assert lines.counts.tolist() == [5, 0], "nobody writes a line"
        assert not lines.ring[[0, 2]].any(), "nobody amends another line"
        line = lines.ring[4 % 3]
        assert line[:2].tolist() == [4, 77 if lines.counts.is_cuda else 0]
        found = [part[4 % 3].clone() for part in logprobs]
        return Amended(line.clone(), lines.last_tokens.cpu(), asked.generated.cpu(), *found)


@dataclass(frozen=True)
class Amended:
    """What sampling leaves behind."""

    line: Tensor
    last_tokens: Tensor
    generated: Tensor
    values: Tensor
    tokens: Tensor
    ranks: Tensor

    def check_against(self, wanted: "Amended", case: AskingCase) -> None:
        """Tokens and counts are equal, log-probabilities nearly."""
        assert self.line[LINE_HEAD:].tolist() == wanted.line[LINE_HEAD:].tolist(), case
        assert self.line[3] == wanted.line[3] == int((case.rows != 0).any())
        assert torch.equal(self.last_tokens, wanted.last_tokens)
        assert torch.equal(self.generated, wanted.generated)
        told = case.asked.num_logprobs.cpu()[case.rows.cpu().long()]
        for at, (row, num_top) in enumerate(zip(case.rows.tolist(), told.tolist(), strict=True)):
            if row == 0 or num_top < 0:
                assert not self.values[at].any()
                continue
            upto = num_top + 1
            torch.testing.assert_close(self.values[at, :upto], wanted.values[at, :upto], atol=2e-5, rtol=2e-5)
            raw = case.logits[case.places[at].long()].cpu()
            assert torch.equal(raw[self.tokens[at, :upto]], raw[wanted.tokens[at, :upto]]), "or a tie"
            assert self.tokens[at, 0] == self.line[LINE_HEAD + case.places[at]]
            assert len(set(self.tokens[at, 1:upto].tolist())) == num_top
            assert self.ranks[at] == int((raw > raw[self.tokens[at, 0]]).sum()) + 1


def check_untouched(case: AskingCase, amended: Amended) -> None:
    """Who does not ask has what plain sampling left; row 0 is as it was."""
    others = torch.ones(case.logits.size(0), dtype=torch.bool)
    others[case.places[case.rows != 0].cpu().long()] = False
    assert (amended.line[LINE_HEAD:][others] == 7).all()
    assert amended.last_tokens[0] == 9
    assert torch.equal(amended.generated[0], case.asked.generated[0].cpu())


def check_asking(case: AskingCase, *, has_filters: bool = True) -> None:
    """By kernels as by the reference, together as one by one, with the same bits."""
    on_cpu = case.to("cpu")
    found = case.sampled(by_kernels=True, has_filters=has_filters)
    found.check_against(on_cpu.sampled(by_kernels=False, has_filters=has_filters), on_cpu)
    check_untouched(case, found)


def check_tokens(case: AskingCase) -> None:
    """Tokens that are chosen and not returned, as behind drafts, are those that are returned otherwise."""
    on_cpu = case.to("cpu")
    returned = on_cpu.sampled(by_kernels=False).line[LINE_HEAD:][on_cpu.places.long()]
    wanted = torch.where(on_cpu.rows != 0, returned, 0).tolist()
    assert verification._by_kernels(*case.operands()).tolist() == wanted
    assert verification.tokens_of_asking(*on_cpu.operands()).tolist() == wanted


def check_alone(case: AskingCase) -> None:
    """A request's token, log-probabilities and counts have the same bits in any company, in either graph."""
    together = case.sampled(by_kernels=True)
    for at, one in enumerate(case.one_by_one()):
        alone = one.sampled(by_kernels=True)
        row, place = int(one.rows), int(one.places)
        if row == 0:
            assert not alone.line[3]
            continue
        assert alone.line[LINE_HEAD + place] == together.line[LINE_HEAD + place]
        assert torch.equal(alone.generated[row], together.generated[row])
        for part in ("values", "tokens", "ranks"):
            assert torch.equal(getattr(alone, part)[0], getattr(together, part)[at])


def check_both_graphs(case: AskingCase) -> None:
    """Requests without filters get the same bits from the graph that knows no filters."""
    one, other = (case.sampled(by_kernels=True, has_filters=filters) for filters in (False, True))
    for part in ("last_tokens", "generated", "values", "tokens", "ranks"):
        assert torch.equal(getattr(one, part), getattr(other, part)), part
    assert one.line[LINE_HEAD:].tolist() == other.line[LINE_HEAD:].tolist()


def check_plain(device: torch.device | str, num_requests: int, vocab: int) -> None:
    """Who asks for no more than a temperature and a seed is drawn the same token here."""
    plain = PlainCase.random(num_requests, vocab, 3, torch.float32).to(device)
    settings, rows = plain.settings, plain.rows
    settings.is_plain.fill_(1)
    of_rows = {"temperature": settings.temperature, "seeds": settings.seeds, "lengths": settings.lengths}
    asked = nothing_asked(len(settings.seeds), vocab, device, **of_rows)
    case = AskingCase(plain.logits, rows, torch.arange(num_requests, device=device).int(), asked)
    tokens = case.sampled(by_kernels=True).line[LINE_HEAD:]
    wanted = torch.tensor(plain.by_kernels())
    is_real = (rows != 0).cpu()
    assert torch.equal(tokens[is_real], wanted[is_real])
    assert (tokens[~is_real] == 7).all()
