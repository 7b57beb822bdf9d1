"""Plain sampling inside decode graphs on CUDA, where kernels read the rows, write lines and count them."""

from dataclasses import replace

import pytest
import torch

from engine.conftest import shallow  # noqa: F401
from engine.test_plain_sampling import (  # noqa: F401
    test_a_row_forgets_the_kind_of_its_last_tenant,
    test_batch_invariant_steps_are_not_decode_steps,
    test_embeddings_beside_generation_write_no_line,
    test_every_mix_of_kinds_gives_each_its_own_tokens,
)
from kernels.small_kernel_checks import PlainCase, lines_of
from ostinato.graphs import CaptureOptions, graphed
from ostinato.kernels.constants import GREEDY_BELOW
from ostinato.kernels.sampling import plain
from ostinato.kernels.sampling.token_lines import LINE_HEAD

VOCAB = 151_936


@pytest.mark.parametrize("num_requests", [1, 16, 17, 256])
def test_a_graph_draws_and_returns_what_it_does_outside(device: torch.device, num_requests: int) -> None:
    """Behind a kernel that makes the logits, at lengths that move on: every line, a hundred times."""
    case = PlainCase.random(num_requests, VOCAB, 5, torch.float32).to(device)
    if num_requests == 1:  # neither padding nor passed over
        case = replace(case, rows=torch.ones_like(case.rows))
        case.settings.is_plain.fill_(1)
    settings = case.settings
    inside, outside = (lines_of(settings.is_plain.size(0), num_requests, device) for _ in range(2))

    def step(logits: torch.Tensor, rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
        plain.return_plain(logits * 0.5, rows, settings, inside)
        return ()

    function = graphed(step, ladder=[num_requests], pads={"rows": 0}, options=CaptureOptions(strict=True))
    function.capture(case.logits, case.rows)
    inside.counts.zero_()
    texts = set()
    for count in range(100):
        function(case.logits, case.rows)
        plain.return_plain(case.logits * 0.5, case.rows, settings, outside)
        settings.lengths.add_(1)
        torch.cuda.synchronize()
        assert inside.counts.tolist() == outside.counts.tolist() == [count + 1, 0]
        ours, wanted = inside.ring[count % 3].tolist(), outside.ring[count % 3].tolist()
        assert ours[0] == wanted[0] == count
        assert ours[LINE_HEAD:] == wanted[LINE_HEAD:]
        assert torch.equal(inside.last_tokens, outside.last_tokens)
        texts.add(tuple(ours[LINE_HEAD:]))
    assert len(texts) > 1 or settings.temperature[1] < GREEDY_BELOW
    assert not function.report().eager_steps
