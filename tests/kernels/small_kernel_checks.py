"""Checks of the kernels at both ends of a decode step and of sampling, for the interpreter and for a GPU."""

import torch

from ostinato.kernels import request_rows, sampling, triton_request_rows, triton_sampling


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


def check_return_tokens(device: torch.device | str) -> None:
    """Tokens reach their rows and the lines of the ring in turn, each line with its count and its times."""
    last_tokens = torch.zeros(6, dtype=torch.int64, device=device)
    count = torch.zeros(1, dtype=torch.int64, device=device)
    began = torch.full((1,), 77, dtype=torch.int64, device=device)
    head, before = request_rows.LINE_HEAD, 0
    ring = torch.zeros(3, head + 200, dtype=torch.int64, pin_memory=last_tokens.is_cuda)
    rows = torch.tensor([2, 5, 0, 1] + [0] * 150, dtype=torch.int32, device=device)
    for step in range(5):
        tokens = torch.arange(154, device=device) + 1000 * step
        triton_request_rows.return_tokens(rows, last_tokens, tokens, ring, count, began)
        if last_tokens.is_cuda:
            torch.cuda.synchronize()
        line = ring[step % 3].tolist()
        assert line[0] == step
        assert line[head : head + 154] == tokens.tolist()
        if last_tokens.is_cuda:
            assert line[1] == 77
            assert line[2] > before
            before = line[2]
        first = 1000 * step
        assert last_tokens.tolist() == [0, first + 3, first, 0, 0, first + 1]
    assert count.item() == 5


def check_sample_rows(device: torch.device | str, dtype: torch.dtype = torch.float32) -> None:
    """The same draws as in plain torch; greedy where the temperature says so."""
    generator = torch.Generator().manual_seed(3)
    num_rows, vocab = 24, 5001
    logits = (3 * torch.randn(num_rows, vocab, generator=generator)).to(dtype).to(device)
    temperature = torch.tensor([0.0, 1e-6, 0.7, 1.0, 2.5, 1e-3] * 4, device=device)
    seeds = torch.randint(-(2**62), 2**62, (num_rows,), generator=generator).to(device)
    positions = torch.randint(0, 4000, (num_rows,), generator=generator).to(device)
    below = sampling.GREEDY_BELOW
    found = triton_sampling.sample_rows(logits, temperature, seeds, positions, below)
    wanted = sampling.sample_unfiltered(logits.float(), temperature, seeds, positions)
    assert torch.equal(found.cpu(), wanted.cpu())
    assert torch.equal(found[::6].cpu(), logits[::6].float().argmax(-1).cpu())
    assert not torch.equal(found[3::6].cpu(), logits[3::6].float().argmax(-1).cpu())


def check_all(device: torch.device | str) -> None:
    """Everything here."""
    check_begin_decode(device)
    check_return_tokens(device)
    check_sample_rows(device)
