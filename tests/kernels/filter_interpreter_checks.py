"""Runs in a process with TRITON_INTERPRET=1 (see `test_filters`): the cuts without a sort, at tiny sizes.

python -m kernels.filter_interpreter_checks NUMBER_OF_RANDOM_EXAMPLES
"""

import sys
from unittest.mock import patch

import torch
import triton.language as tl
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from kernels import unchanged
from kernels.filter_checks import KINDS, Filtering, check_cuts, logits_of
from ostinato.kernels.sampling.filters import triton_cuts, triton_meeting, triton_narrow

# (kind, vocabulary, seed): with the other checks they take every branch of the kernels 60 random ones took.
CASES = (
    ("equal", 31, 8445),
    ("flat", 16, 7104),
    ("flat", 257, 1),
    ("spread", 64, 2),
    ("peaked", 100, 3),
    ("bfloat16", 1, 4),
    ("ties", 64, 5),
    ("zeros", 31, 6),
    ("sorted", 100, 7),
    ("masked", 64, 8),
)


def check_any_rows(examples: int) -> None:
    """Groups of 8 and room for 16 tokens: every way through the kernel is taken."""

    @settings(
        max_examples=examples,
        deadline=None,
        phases=(Phase.generate,),  # shrinking takes minutes here
        suppress_health_check=list(HealthCheck),
    )
    @given(
        kind=st.sampled_from(KINDS),
        vocab=st.sampled_from([1, 3, 16, 31, 64, 100, 257, 700]),
        seed=st.integers(0, 10_000),
    )
    def check_one(kind: str, vocab: int, seed: int) -> None:
        check_cuts(Filtering.random(logits_of(kind, 2, vocab, seed), seed))

    check_one()


def check_rows_of_a_view() -> None:
    """Rows with gaps between them."""
    logits = logits_of("spread", 3, 150)[:, :100]
    check_cuts(Filtering.random(logits, 3))


def check_rows_on_their_own(num_rows: int, vocab: int, seed: int) -> None:
    """A row's cut has the same bits alone, where a program takes one block, and in company."""
    together = Filtering.random(logits_of("flat", num_rows, vocab), seed)
    for row, cut in enumerate(zip(*together.cuts(), strict=True)):
        alone = Filtering(*(tensor[row : row + 1] for tensor in vars(together).values()))
        assert alone.cuts() == cut


def check_more_ties_than_room() -> None:
    """The cut is among tokens of one logit of which only some can be listed, the first or later ones; by
    top-k, by top-p, and by top-p among more tokens than are listed of those that top-k left."""
    logits = torch.where(torch.arange(70) % 7 == 3, 1.0, 0.0).repeat(8, 1)
    top_k = torch.tensor([12, 27, 40, 69, 0, 0, 60, 45]).int()
    top_p = torch.tensor([1.0, 1.0, 1.0, 1.0, 0.45, 0.9, 0.5, 0.99])
    check_cuts(Filtering(logits, torch.ones(8), top_k, top_p, torch.zeros(8)), twice=False)


def main(examples: int) -> None:
    """Tiny sizes, then those of the kernel itself."""
    tiny = {"_GROUP": 8, "_BLOCK": 64, "_TILE": 32, "_CAPACITY": 16, "_FEW": 4, "_SEGMENT": 8}
    with (
        patch.multiple(triton_cuts, **tiny),
        patch.object(triton_meeting, "_PROGRAMS_WANTED", 8),
        patch.object(triton_narrow, "_TAKEN", tl.constexpr(4)),
    ):
        for kind, vocab, seed in CASES[:1] if unchanged.is_brief() else CASES:
            # Only a GPU, or a read of what nobody wrote, makes a second run another one: see a view's rows.
            check_cuts(Filtering.random(logits_of(kind, 2, vocab, seed), seed), twice=False)
        if unchanged.is_brief():
            print("all checks passed")
            return
        check_rows_of_a_view()
        check_more_ties_than_room()
        check_rows_on_their_own(3, 300, seed=1)
        if examples:
            check_any_rows(examples)
            check_rows_on_their_own(6, 700, seed=8)
    check_cuts(Filtering.random(logits_of("bfloat16", 2, 5001), 1), twice=False)
    print("all checks passed")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(int(sys.argv[1]))
