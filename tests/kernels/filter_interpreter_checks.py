"""Runs in a process with TRITON_INTERPRET=1 (see `test_filters`): the cuts without a sort, at tiny sizes.

python -m kernels.filter_interpreter_checks NUMBER_OF_EXAMPLES
"""

import sys
from unittest.mock import patch

import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from kernels.filter_checks import KINDS, Filtering, check_cuts, logits_of
from ostinato.kernels import sampling, triton_sampling
from ostinato.kernels.filters import triton_cuts
from ostinato.kernels.sampling import GREEDY_BELOW


@settings(
    max_examples=int(sys.argv[1]),
    deadline=None,
    phases=(Phase.generate,),  # shrinking takes minutes here
    suppress_health_check=list(HealthCheck),
)
@given(
    kind=st.sampled_from(KINDS),
    vocab=st.sampled_from([1, 3, 16, 31, 64, 100, 257, 700]),
    seed=st.integers(0, 10_000),
)
def check_any_rows(kind: str, vocab: int, seed: int) -> None:
    """Groups of 8 and room for 16 tokens: every way through the kernel is taken."""
    check_cuts(Filtering.random(logits_of(kind, 2, vocab, seed), seed))


def check_rows_of_a_view() -> None:
    """Rows with gaps between them."""
    logits = logits_of("spread", 4, 300)[:, :200]
    check_cuts(Filtering.random(logits, 3))


def check_rows_on_their_own() -> None:
    """A row's cut has the same bits alone, where a program takes one block, and in company."""
    together = Filtering.random(logits_of("flat", 6, 700), 8)
    for row, cut in enumerate(zip(*together.cuts(), strict=True)):
        alone = Filtering(*(tensor[row : row + 1] for tensor in vars(together).values()))
        assert alone.cuts() == cut


def check_draws() -> None:
    """What is drawn equals the reference's draw, filters on and off in one batch."""
    n, vocab = 12, 700
    case = Filtering.random(logits_of("spread", n, vocab, 1), 5)
    rows, seeds, lengths = torch.arange(n, dtype=torch.int32), torch.arange(n), torch.arange(n).int() * 7
    settings_of_rows = (case.temperature, case.top_k, case.top_p, case.min_p, seeds)
    wanted = sampling.sample(case.logits, rows, sampling.SamplingSettings(*settings_of_rows), lengths)
    drawn = triton_sampling.sample_rows(
        case.logits, rows, case.temperature, seeds, lengths, GREEDY_BELOW, *case.cuts()
    )
    assert torch.equal(drawn, wanted)


def check_op_is_declared_truthfully() -> None:
    case = Filtering.random(logits_of("spread", 2, 20))
    torch.library.opcheck(
        torch.ops.ostinato.find_cuts.default,
        (case.logits, case.temperature, case.top_k, case.top_p, case.min_p, GREEDY_BELOW),
        test_utils=("test_schema", "test_faketensor"),
    )


def main() -> None:
    """Tiny sizes, then those of the kernel itself."""
    tiny = {"_GROUP": 8, "_BLOCK": 64, "_TILE": 32, "_CAPACITY": 16, "_FEW": 4, "_SEGMENT": 8}
    with patch.multiple(triton_cuts, **tiny, _PROGRAMS_WANTED=8):
        check_any_rows()
        check_rows_of_a_view()
        check_rows_on_their_own()
        check_draws()
        check_op_is_declared_truthfully()
    check_cuts(Filtering.random(logits_of("bfloat16", 4, 5001), 1))
    print("all checks passed")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
