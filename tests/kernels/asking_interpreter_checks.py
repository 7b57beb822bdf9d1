"""Runs in a process with TRITON_INTERPRET=1 (see `test_asking_rows`): requests that ask for more, tiny sizes.

python -m kernels.asking_interpreter_checks few|all
"""

import sys
from unittest.mock import patch

import torch

from kernels import unchanged
from kernels.asking_checks import (
    AskingCase,
    check_alone,
    check_asking,
    check_both_graphs,
    check_plain,
    check_tokens,
)
from kernels.filter_checks import logits_of
from ostinato.kernels.sampling.filters import triton_cuts, triton_meeting

TINY = {"_GROUP": 8, "_BLOCK": 32, "_TILE": 32, "_CAPACITY": 16, "_FEW": 4, "_SEGMENT": 8}
"""So that a few dozen tokens are several blocks."""
FEW = (("spread", 70, 1), ("ties", 66, 4))


def check_cases(cases: tuple[tuple[str, int, int], ...]) -> None:
    """With filters and without."""
    for kind, vocab, seed in cases:
        logits = logits_of(kind, 6, vocab, seed)
        check_asking(AskingCase.random(logits, 5, seed))
        check_tokens(AskingCase.random(logits, 5, seed + 2))
        check_asking(AskingCase.random(logits, 5, seed + 1, has_filters=False), has_filters=False)


def check_padding_alone() -> None:
    """Nothing is written at all."""
    case = AskingCase.random(logits_of("spread", 2, 40), 2, 3)
    amended = AskingCase(case.logits, case.rows * 0, case.places, case.asked).sampled(by_kernels=True)
    assert amended.line[3] == 0
    assert amended.line[4:].tolist() == [7, 7]
    assert torch.equal(amended.generated, case.asked.generated)


def check_op_is_declared_truthfully() -> None:
    case = AskingCase.random(logits_of("spread", 2, 20), 2, 3)
    lines, logprobs = case.lines()
    torch.library.opcheck(
        torch.ops.ostinato.sample_asking.default,
        (case.logits, case.rows, case.places, [*case.asked[:-1]], case.asked[-1], *lines, *logprobs, True),
        test_utils=("test_schema", "test_faketensor"),
    )


def main(which: str) -> None:
    """Tiny sizes, then those of the kernel itself."""
    with patch.multiple(triton_cuts, **TINY), patch.object(triton_meeting, "_PROGRAMS_WANTED", 8):
        check_padding_alone()
        if unchanged.is_brief():
            check_cases(FEW[:1])
            print("all checks passed")
            return
        check_cases(FEW)
        check_plain("cpu", 7, 70)
        check_op_is_declared_truthfully()
        check_alone(AskingCase.random(logits_of("flat", 3, 70, 7), 2, 7))
        check_both_graphs(AskingCase.random(logits_of("spread", 4, 70, 8), 3, 8, has_filters=False))
        if which == "all":
            kinds = ("flat", "spread", "peaked", "ties", "masked")
            check_alone(AskingCase.random(logits_of("flat", 6, 131, 7), 5, 7))
            check_cases(tuple((kind, 33 + 17 * i, 10 * i + 3) for i in range(12) for kind in kinds))
    check_asking(AskingCase.random(logits_of("spread", 4, 5001, 9), 4, 9))
    print("all checks passed")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(sys.argv[1])
