"""Runs in a process with TRITON_INTERPRET=1 (see `test_speculation`); one printed line a check.

python -m kernels.speculation_interpreter_checks all
"""

import torch

from kernels import speculation_checks as checks
from ostinato.kernels.dependent_launch import INTERPRETED
from ostinato.kernels.speculation import triton_chains, triton_ngram, triton_verification

TRITON = checks.Ops(
    triton_verification.begin_verify,
    triton_verification.accept,
    triton_ngram.draft_ngram,
    triton_ngram.note_history,
    triton_chains.chain_start,
    triton_chains.chain_next,
    triton_chains.note_best,
)


def check_inputs() -> None:
    """One program and several."""
    for num_requests, q in ((1, 1), (4, 5), (40, 6)):
        checks.check_begin_verify("cpu", num_requests, q, TRITON)


def check_drafts() -> None:
    """Texts of a block and of several."""
    checks.check_note_history("cpu", TRITON)
    for seed in range(14):
        checks.check_ngram("cpu", seed, TRITON)


def check_chains() -> None:
    """A draft's passes, and the tokens they give."""
    for seed in range(12):
        checks.check_chain("cpu", seed, TRITON)
    for vocab in (40, 5000):
        checks.check_best_draft("cpu", vocab, TRITON)


def check_acceptance() -> None:
    """One program and several, vocabularies of a block and of two."""
    seen = set()
    for seed in range(9):
        q = (1, 2, 3, 5, 6, 6, 6)[seed % 7]
        seen |= {(q, a) for a in checks.check_accept("cpu", (1, 3, 11)[seed % 3], q, 40, seed, TRITON)}
    checks.check_accept("cpu", 20, 5, 2100, 5, TRITON)
    assert {(6, 0), (6, 1), (6, 5)} <= seen, seen


def check_ops_are_declared_truthfully() -> None:
    """Schemas: what is changed is said to be changed, and nothing else is."""
    tests = ("test_schema", "test_faketensor")
    opcheck, ops = torch.library.opcheck, torch.ops.ostinato
    case = checks.AcceptCase.random("cpu", 3, 4, 40, 1)
    state, lines, rows = case.state, case.lines, case.rows
    texts = (state.lengths, state.last_tokens)
    opcheck(ops.begin_verify.default, (rows, 4, *texts, state.drafts, lines.began), test_utils=tests)
    opcheck(ops.note_history.default, (rows, *texts, state.history), test_utils=tests)
    looked = (rows, 3, *texts, state.history, state.drafts, 1, 3, 52)
    opcheck(ops.draft_ngram.default, looked, test_utils=tests)
    opcheck(ops.best_of_blocks.default, (case.logits, rows, *case.settings, True), test_utils=tests)
    base = state.lengths - 1
    opcheck(ops.chain_start.default, (rows, 7, 1, *texts, state.drafts, base, 7), test_utils=tests)
    opcheck(ops.chain_next.default, (rows, state.lengths, 1), test_utils=tests)
    drafted = (case.logits[:3], rows, 1, state.drafts, torch.arange(40))
    opcheck(ops.note_best_draft.default, drafted, test_utils=tests)
    values, tokens = torch.rand(12, 2), torch.ones(12, 2, dtype=torch.int32)
    for rates, history in ((None, state.history), (torch.rand(6), None)):
        kept = (*state[:5], history, case.settings.seeds, rates, *lines[1:])
        opcheck(ops.accept_best.default, (rows, 4, values, tokens, 40, *kept), test_utils=tests)


CHECKS = (check_inputs, check_drafts, check_chains, check_acceptance, check_ops_are_declared_truthfully)


def main() -> None:
    """All of them: they are quick."""
    assert INTERPRETED
    for each in CHECKS:
        each()
        print(each.__name__)
    print("all checks passed")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
