"""Checks of the kernels at both ends of a decode step and of sampling, for the interpreter and for a GPU."""

from dataclasses import dataclass

import torch

from ostinato.kernels.decode_inputs import request_rows, triton_request_rows
from ostinato.kernels.sampling import torch_reference, triton_draw, triton_return
from ostinato.kernels.sampling.plain import PlainSettings, return_plain
from ostinato.kernels.sampling.token_lines import LINE_HEAD, TokenLines


def check_begin_decode(device: torch.device | str) -> None:
    """Rows are read and moved on; padding's row 0 is not."""
    lengths = torch.tensor([0, 7, 3, 100, 0, 15], dtype=torch.int32)
    last_tokens = torch.tensor([0, 11, 12, 13, 14, 15])
    for rows in ([3, 1, 5, 0, 0], [2], [0] * 140, [5, 4, 3, 2, 1] + [0] * 130):
        picked = torch.tensor(rows, dtype=torch.int32)
        wanted_lengths = lengths.clone()
        began = torch.zeros(1, dtype=torch.int64, device=device)
        wanted = request_rows.begin_decode(picked, wanted_lengths, last_tokens, began)
        moved = lengths.to(device)
        found = triton_request_rows.begin_decode(picked.to(device), moved, last_tokens.to(device), began)
        for one, other in zip(found, wanted, strict=True):
            assert torch.equal(one.cpu(), other)
            assert one.dtype == other.dtype
        assert torch.equal(moved.cpu(), wanted_lengths)
        assert moved[0] == 0
        assert (began.item() > 0) == moved.is_cuda


def lines_of(num_rows: int, max_requests: int, device: torch.device | str) -> TokenLines:
    """Three empty ones, begun at 77."""
    last_tokens = torch.zeros(num_rows, dtype=torch.int64, device=device)
    return TokenLines.of(last_tokens, torch.full_like(last_tokens[:1], 77), max_requests, 3)


def line_of(lines: TokenLines, step: int) -> list[int]:
    """What the host finds after so many steps."""
    if lines.counts.is_cuda:
        torch.cuda.synchronize()
    assert lines.counts.tolist() == [step + 1, 0]
    return lines.ring[step % lines.ring.size(0)].tolist()


def check_return_tokens(device: torch.device | str) -> None:
    """Tokens reach their rows and the lines of the ring in turn, each line with its count and its times.

    By one program and by several.
    """
    for num_requests in (4, 16, 17, 154):
        lines, before = lines_of(6, 200, device), 0
        rows = torch.tensor(([2, 5, 0, 1] + [0] * 150)[:num_requests], dtype=torch.int32, device=device)
        for step in range(5):
            tokens = torch.arange(num_requests, device=device) + 1000 * step
            blocks = torch.stack([tokens - 1, tokens, tokens + 1], 1).int()
            values = torch.tensor([[0.5, 2.0, -1.0]], device=device).expand(num_requests, 3).contiguous()
            triton_return.return_best(rows, values, blocks, 10_000, *lines)
            line = line_of(lines, step)
            assert line[0] == step
            assert line[LINE_HEAD : LINE_HEAD + num_requests] == tokens.tolist()
            if lines.counts.is_cuda:
                assert line[1] == 77
                assert line[2] > before
                before = line[2]
            first = 1000 * step
            assert lines.last_tokens.tolist() == [0, first + 3, first, 0, 0, first + 1]


def check_greedy(device: torch.device | str, dtype: torch.dtype, width: int) -> None:
    """The first of equal ones wins, also across blocks; any token of a row of NaN is legal."""
    logits = torch.randn(5, width, generator=torch.Generator().manual_seed(5)).to(device, dtype)
    best = logits.max() + 1
    wanted = [0, width - 1, width // 2, width // 3, 2]
    for row, column in enumerate(wanted):
        logits[row, column] = best
        logits[row, min(column + 1, width - 1)] = best
    logits[4, width - 1] = best
    logits[3] = float("-inf")
    wanted[3] = 0
    case = PlainCase.greedy(logits)
    assert case.by_kernels() == wanted
    view = torch.cat([logits, logits], dim=1)[:, :width]
    assert PlainCase.greedy(view).by_kernels() == wanted
    if logits.is_cuda:  # NumPy, which the interpreter runs on, refuses to look for the largest NaN
        [token] = PlainCase.greedy(torch.full_like(logits[:1], float("nan"))).by_kernels()
        assert 0 <= token < width


@dataclass(frozen=True)
class PlainCase:
    """Logits of some requests and what their rows ask for."""

    logits: torch.Tensor
    rows: torch.Tensor
    settings: PlainSettings

    @classmethod
    def greedy(cls, logits: torch.Tensor) -> "PlainCase":
        """Every row."""
        ones = torch.ones(logits.size(0) + 1, dtype=torch.int32, device=logits.device)
        rows = torch.arange(1, logits.size(0) + 1, dtype=torch.int32, device=logits.device)
        return cls(logits, rows, PlainSettings(ones, ones.float() * 1e-6, ones.long(), ones))

    @classmethod
    def random(cls, num_requests: int, vocab: int, seed: int, dtype: torch.dtype) -> "PlainCase":
        """Greedy, random and passed-over requests in any rows, and padding."""
        generator = torch.Generator().manual_seed(seed)

        def integers(low: int, high: int, count: int) -> torch.Tensor:
            return torch.randint(low, high, (count,), generator=generator)

        num_rows = 2 * num_requests
        logits = 3 * torch.randn(num_requests, vocab, generator=generator)
        forbidden = torch.rand(num_requests, vocab, generator=generator) < 0.3
        logits = logits.masked_fill(forbidden.index_fill(1, integers(0, vocab, 1), False), float("-inf"))
        logits[::5] = logits[::5].round()  # ties
        rows = torch.randperm(num_rows, generator=generator)[:num_requests].int()
        rows[1::4] = 0
        temperature = torch.tensor([0.0, 1e-6, 0.7, 1.0, 2.5, 1e-3])[integers(0, 6, num_rows)]
        is_plain = (integers(0, 4, num_rows) > 0).int().index_fill(0, torch.tensor([0]), 0)
        seeds = integers(-(2**62), 2**62, num_rows)
        lengths = integers(0, 4000, num_rows).int()
        return cls(logits.to(dtype), rows, PlainSettings(is_plain, temperature, seeds, lengths))

    def to(self, device: torch.device | str) -> "PlainCase":
        """The same on another device."""
        settings = PlainSettings(*(value.to(device) for value in self.settings))
        return PlainCase(self.logits.to(device), self.rows.to(device), settings)

    def wanted(self) -> list[int]:
        """Row by row, by the definition of a draw."""
        tokens = []
        for logits, row in zip(self.logits.float(), self.rows.tolist(), strict=True):
            one = slice(row, row + 1)
            if not self.settings.is_plain[row]:
                tokens.append(0)
            elif self.settings.temperature[row] < torch_reference.GREEDY_BELOW:
                tokens.append(int(logits.argmax()))
            else:
                noise = torch_reference.gumbel_noise(
                    self.settings.seeds[one], self.settings.lengths[one], len(logits)
                )
                tokens.append(int((logits + self.settings.temperature[row] * noise[0]).argmax()))
        return tokens

    def by_kernels(self) -> list[int]:
        """In the interpreter also on a CPU."""
        device = self.logits.device
        lines = lines_of(self.settings.is_plain.size(0), len(self.rows), device)
        best = triton_draw.best_of_blocks(self.logits, self.rows, *self.settings)
        triton_return.return_best(self.rows, *best, self.logits.size(1), *lines)
        return self.returned(lines)

    def by_dispatch(self) -> list[int]:
        """By the device's own."""
        lines = lines_of(self.settings.is_plain.size(0), len(self.rows), self.logits.device)
        return_plain(self.logits, self.rows, self.settings, lines)
        return self.returned(lines)

    def returned(self, lines: TokenLines) -> list[int]:
        """The line's tokens, which are those of the rows too."""
        tokens = line_of(lines, 0)[LINE_HEAD:]
        kept = torch.zeros_like(lines.last_tokens, device="cpu")
        for row, token in zip(self.rows.tolist(), tokens, strict=True):
            kept[row] = token if row else 0
        assert torch.equal(lines.last_tokens.cpu(), kept)
        return tokens


def check_return_plain(device: torch.device | str, dtype: torch.dtype = torch.float32) -> None:
    """Each request gets the token that is defined by its own logits, temperature, seed and length."""
    for seed, (num_requests, vocab) in enumerate(((1, 300), (20, 5001), (33, 4096), (7, 1), (5, 8193))):
        case = PlainCase.random(num_requests, vocab, seed, dtype).to(device)
        wanted = case.wanted()
        assert case.by_kernels() == wanted
        assert case.by_dispatch() == wanted


def check_all(device: torch.device | str) -> None:
    """Everything here."""
    check_begin_decode(device)
    check_return_tokens(device)
    check_greedy(device, torch.float32, 9000)
    check_return_plain(device)
