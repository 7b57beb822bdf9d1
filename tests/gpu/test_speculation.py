"""Speculation's kernels on a GPU: inputs, drafts, acceptance, and attention of a few tokens a request."""

import dataclasses

import pytest
import torch

from kernels import fused_checks
from kernels import speculation_checks as checks
from ostinato.kernels.attention import cuda_decode, gpu_ops
from ostinato.kernels.cuda import compiled
from ostinato.kernels.decode_inputs import request_rows

LLAMA, QWEN3 = (32, 8, 128), (16, 8, 128)
CONTEXTS = [5, 16, 17, 20, 31, 33, 255, 260, 272, 1000, 2049, 4100]


@pytest.mark.parametrize(("num_requests", "q"), [(1, 1), (1, 5), (7, 6), (40, 4)])
def test_inputs_of_a_verification(device, num_requests, q):
    checks.check_begin_verify(device, num_requests, q)


def test_drafts(device):
    checks.check_note_history(device)
    for seed in range(60):
        checks.check_ngram(device, seed)


def test_chains(device):
    for seed in range(40):
        checks.check_chain(device, seed)
    for vocab in (40, 32_000, 128_256):
        checks.check_best_draft(device, vocab)


def test_the_time_is_noted(device):
    began = torch.zeros(1, dtype=torch.int64, device=device)
    request_rows.note_time(began)
    first = began.item()
    request_rows.note_time(began)
    assert 0 < first < began.item()


def test_acceptance(device):
    seen = set()
    for seed in range(40):
        q = 1 + seed % 6
        seen |= {(q, a) for a in checks.check_accept(device, 1 + seed % 19, q, 40, seed)}
    assert {(6, a) for a in range(6)} <= seen
    for num_requests, vocab in ((1, 128_256), (2, 128_256), (64, 3_000)):
        checks.check_accept(device, num_requests, 5, vocab, num_requests)


def test_steps_in_a_graph_count_their_lines(device):
    """Acceptance captured and replayed gives the lines that launches give."""
    captured, launched = (checks.AcceptCase.random(device, 20, 5, 300, 4) for _ in range(2))

    def step(case: checks.AcceptCase) -> None:
        checks.BY_DEVICE.accept(case.logits, case.rows, case.q, case.settings, case.state, None, case.lines)

    step(checks.AcceptCase.random(device, 20, 5, 300, 4))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step(captured)
    for _ in range(10):
        graph.replay()
        step(launched)
        torch.cuda.synchronize()
        for found, wanted in zip(
            (*captured.state, captured.lines.counts), (*launched.state, launched.lines.counts), strict=True
        ):
            assert torch.equal(found, wanted)
        tokens, wanted = captured.lines.ring[:, 4:], launched.lines.ring[:, 4:]
        assert torch.equal(tokens, wanted)


@pytest.fixture
def only_cuda(device, monkeypatch):
    """A GPU that has the kernel, and no way around it."""
    if not compiled.is_supported(device):
        pytest.skip("needs compute capability 9.0 and NVRTC")

    def refuse(*args: object) -> None:
        raise AssertionError("attention of any batch was asked")

    monkeypatch.setattr(gpu_ops, "prepare_heads", refuse)


@pytest.mark.usefixtures("only_cuda")
@pytest.mark.parametrize("window", [None, 1, 100])
@pytest.mark.parametrize(
    ("heads", "places"),
    [
        (LLAMA, 2),
        (LLAMA, 3),
        (LLAMA, 5),
        (LLAMA, 8),
        (QWEN3, 5),
        (QWEN3, 16),
        ((14, 2, 64), 4),
        ((8, 8, 64), 5),
    ],
    ids=str,
)
@pytest.mark.parametrize("num_requests", [1, 7, 30])
def test_attention_of_a_few_tokens(device, heads, places, num_requests, window):
    requests = [(max(length, places), places) for length in (CONTEXTS * 3)[-num_requests:]]
    fused_checks.check_equal_places(
        device, torch.bfloat16, requests, places, heads, norm=heads == QWEN3, window=window
    )


@pytest.mark.usefixtures("only_cuda")
def test_attention_of_fewer_tokens_than_places(device):
    requests = [(length, 1 + at % 5) for at, length in enumerate(CONTEXTS)]
    for parts in (1, 2):
        fused_checks.check_equal_places(device, torch.bfloat16, requests, 5, LLAMA, norm=False, parts=parts)


def test_what_attention_of_a_few_tokens_does_not_serve_runs_as_any_batch(device):
    requests = [(max(length, 5), 5) for length in CONTEXTS]
    fused_checks.check_equal_places(device, torch.float32, requests, 5, (4, 2, 64), norm=True)
    fused_checks.check_equal_places(device, torch.bfloat16, requests, 5, (16, 2, 64), norm=True)


@pytest.mark.usefixtures("only_cuda")
def test_attention_replays_in_a_graph_with_the_same_bits(device):
    """Counters are back at zero after every launch."""
    step = fused_checks.equal_places_step(device, [(length, 5) for length in CONTEXTS], 5, LLAMA)
    wanted = step.attend().clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step.attend()
    for _ in range(30):
        out.fill_(float("nan"))
        graph.replay()
        assert torch.equal(out, wanted)
    assert not cuda_decode.counters_of(step.k_cache).any()


@pytest.mark.usefixtures("only_cuda")
def test_a_request_has_the_same_bits_beside_any_others(device):
    step = fused_checks.equal_places_step(device, [(1237, 5)] + [(900, 5)] * 7, 5, LLAMA)
    wanted = step.attend()[:5].clone()
    shorter = step.batch.positions.clone()
    shorter[5:40] -= 400
    moved = dataclasses.replace(step.batch, positions=shorter)
    assert torch.equal(dataclasses.replace(step, batch=moved).attend()[:5], wanted)
