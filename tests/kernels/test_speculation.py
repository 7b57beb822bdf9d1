"""Speculation on the device: the torch reference, its capture, and Triton's kernels in the interpreter."""

import pytest
import torch

from kernels import speculation_checks as checks
from kernels.interpreted import assert_passes
from kernels.test_triton_kernels import compiled
from ostinato.graphs import capture_block
from ostinato.kernels.sampling import torch_reference
from ostinato.kernels.speculation.ngram import draft_ngram
from ostinato.kernels.speculation.verification import accept, begin_verify

TYPES = dict.fromkeys(("input_ids", "positions", "last_tokens", "drafts", "began", "seeds"), "*i64")
TYPES |= dict.fromkeys(("ring", "counts", "features", "ends", "offsets", "ids"), "*i64")
TYPES |= {"logits": "*fp32", "best": "*fp32", "best_at": "*i32", "base": "*i32"}
TYPES |= {"values": "*fp32", "rates": "*fp32"}
TYPES |= dict.fromkeys(("rows", "tokens", "lengths", "num_accepted", "limits", "history"), "*i32")
TYPES |= dict.fromkeys(("token_rows", "seq_lens", "query_starts", "query_lens"), "*i32")


@pytest.mark.parametrize(("num_requests", "q"), [(1, 1), (1, 5), (4, 2), (7, 6)])
def test_inputs_of_a_verification(num_requests, q):
    checks.check_begin_verify("cpu", num_requests, q)


def test_drafts_are_what_followed_the_longest_latest_occurrence():
    for seed in range(60):
        checks.check_ngram("cpu", seed)
    assert checks.looked_up([1, 2, 3, 9, 1, 2, 4, 1, 2], 3, 1, 2) == [4, 1, 2]
    assert checks.looked_up([1, 2, 3, 9, 2, 4, 1, 2], 3, 2, 3) == [3, 9, 2]
    assert checks.looked_up([5, 7, 7], 4, 1, 3) == [7, 7, 7, 7]
    assert checks.looked_up([5, 6, 7], 2, 1, 3) == [7, 7]


def test_the_last_token_is_noted():
    checks.check_note_history("cpu")


def test_a_draft_catches_up_and_goes_on():
    for seed in range(40):
        checks.check_chain("cpu", seed)


def test_the_best_token_of_a_draft_is_noted():
    checks.check_best_draft("cpu", 40)


def test_what_agrees_is_kept_and_every_length_occurs():
    seen = set()
    for seed in range(40):
        q = 1 + seed % 6
        seen |= {(q, a) for a in checks.check_accept("cpu", 1 + seed % 7, q, 40, seed)}
    assert {(6, a) for a in range(6)} <= seen


def test_synthetic_acceptance_has_the_rates_that_were_asked_for():
    rates = torch.tensor([0.9, 0.6, 0.3])
    seeds = torch.arange(20_000)
    chance = torch_reference.uniform(~seeds, seeds % 100, 1)
    shares = (chance < rates).float().mean(0)
    torch.testing.assert_close(shares, rates, atol=0.012, rtol=0)


def test_a_speculative_step_is_captured_and_follows_its_rows():
    """Draft, inputs and acceptance as one graph; replays equal eager steps on the same state."""
    captured, eager = (checks.AcceptCase.random("cpu", 4, 4, 3, 3) for _ in range(2))

    def step_of(case):
        def step(logits, rows):
            state = case.state
            draft_ngram(rows, 3, state.lengths, state.last_tokens, state.history, state.drafts, 1, 3, 52)
            texts = (state.lengths, state.last_tokens, state.drafts)
            begun = begin_verify(rows, 4, *texts, case.lines.began)
            accept(logits.transpose(0, 1).reshape(-1, 3), rows, 4, case.settings, state, None, case.lines)
            return begun.input_ids.view(-1, 4), begun.positions.view(-1, 4)

        return step

    rows, logits = torch.tensor([3, 5, 1, 0], dtype=torch.int32), torch.randn(4, 4, 3)
    with capture_block() as block:
        found = step_of(captured)(logits, rows)
    assert captured.lines.counts.tolist() == [0, 0], "capturing writes no line"
    lengths = set()
    for _ in range(8):
        logits.copy_(torch.randn(4, 4, 3))
        block.replay()
        for part, wanted in zip(found, step_of(eager)(logits, rows), strict=True):
            assert torch.equal(part, wanted)
        for part, wanted in zip(
            (*captured.state, *captured.lines), (*eager.state, *eager.lines), strict=True
        ):
            assert torch.equal(part, wanted)
        lengths |= set(captured.state.num_accepted[rows[:3].long()].tolist())
    assert len(lengths) > 1


def test_triton_kernels_in_the_interpreter():
    assert_passes("kernels.speculation_interpreter_checks", "all", 300)


@pytest.mark.parametrize(
    "capability", [90, *(pytest.param(other, marks=pytest.mark.slow) for other in (80, 89, 100, 120))]
)
def test_kernels_compile(capability):
    """With every switch on; for what a Llama-3.1-8B has."""
    triton = pytest.importorskip("triton")
    if triton.knobs.runtime.interpret:
        pytest.skip("TRITON_INTERPRET is set: there is nothing to compile")
    from ostinato.kernels.decode_inputs import triton_request_rows
    from ostinato.kernels.speculation import triton_chains, triton_ngram, triton_verification

    lines = {"head": 4, "no_token": -1, "rows_block": 8, "steps_block": 8, "block": 64}
    for kernel, constants in (
        (triton_verification._begin_verify, {"block": 128, "timed": True}),
        (triton_verification._accept, {**lines, "synthetic": True, "noted": True, "timed": True}),
        (triton_verification._accept, {**lines, "synthetic": False, "noted": False, "timed": True}),
        (triton_ngram._draft_ngram, {"k": 4, "k_block": 4, "min_n": 2, "max_n": 5, "block": 2048}),
        (triton_ngram._note_history, {}),
        (triton_request_rows._note_time, {}),
        (triton_chains._chain_start, {"block": 128}),
        (triton_chains._chain_next, {"block": 128}),
        (triton_chains._best_of_block, {"block": 2048}),
        (triton_chains._note_best, {"block": 64, "has_offsets": True}),
    ):
        if "dependent" in kernel.arg_names:
            constants["dependent"] = capability >= 90
        types = {name: TYPES.get(name, "i32") for name in kernel.arg_names if name not in constants}
        assert compiled(kernel, types, constants, capability)
