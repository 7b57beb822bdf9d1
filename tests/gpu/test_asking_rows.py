"""Requests that ask for more than plain sampling, on CUDA: kernels, graphs, and engines that mix them."""

import pytest
import torch

from engine.conftest import TinyModel, prompts_of, shallow  # noqa: F401
from engine.test_plain_sampling import (  # noqa: F401
    test_a_steady_step_uploads_nothing,
    test_only_those_who_ask_for_more_are_served_by_another_graph,
)
from kernels.asking_checks import (
    AskingCase,
    check_alone,
    check_asking,
    check_both_graphs,
    check_plain,
    check_untouched,
)
from kernels.filter_checks import logits_of
from ostinato import LLM, SamplingParams
from ostinato.graphs import CaptureOptions, capture_block, graphed
from ostinato.kernels.sampling import asking_rows
from ostinato.kernels.sampling.token_lines import LINE_HEAD
from ostinato.kernels.speculation.verification import tokens_of_asking

VOCAB = 151_936
KINDS = ("flat", "spread", "peaked", "ties", "masked")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("vocab", [1, 100, 5001])
def test_kernels_are_as_the_reference(device: torch.device, kind: str, vocab: int) -> None:
    for seed in range(4):
        logits = logits_of(kind, 40, vocab, seed)
        check_asking(AskingCase.random(logits, 33, seed, has_filters=False).to(device), has_filters=False)


@pytest.mark.parametrize("kind", KINDS)
def test_filtered_tokens_are_those_of_the_reference(device: torch.device, kind: str) -> None:
    """Up to tokens at the very edge of a filter, where the last bits of a sum decide."""
    same, total = 0, 0
    for seed in range(8):
        case = AskingCase.random(logits_of(kind, 40, 5001, seed), 33, seed)
        wanted, amended = case.sampled(by_kernels=False), case.to(device).sampled(by_kernels=True)
        check_untouched(case, amended)
        same += int((amended.line[LINE_HEAD:] == wanted.line[LINE_HEAD:]).sum())
        total += len(wanted.line) - LINE_HEAD
    assert same > 0.97 * total


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_that_are_not_returned_are_the_same(device: torch.device, kind: str) -> None:
    """As behind drafts: all kernels the same, so every token."""
    for seed in range(4):
        case = AskingCase.random(logits_of(kind, 40, 5001, seed), 33, seed).to(device)
        places = case.places.cpu().long()
        returned = case.sampled(by_kernels=True).line[LINE_HEAD:][places]
        wanted = torch.where(case.rows.cpu() != 0, returned, 0)
        assert tokens_of_asking(*case.operands()).tolist() == wanted.tolist()


@pytest.mark.parametrize("kind", KINDS)
def test_a_request_gets_the_same_bits_in_any_company(device: torch.device, kind: str) -> None:
    logits = logits_of(kind, 64, VOCAB, 5)
    check_alone(AskingCase.random(logits, 30, 5).to(device))
    check_both_graphs(AskingCase.random(logits, 30, 6, has_filters=False).to(device))


@pytest.mark.parametrize("vocab", [300, 5001, VOCAB])
def test_who_asks_for_nothing_gets_the_token_of_plain_sampling(device: torch.device, vocab: int) -> None:
    check_plain(device, 40, vocab)


@pytest.mark.parametrize("has_filters", [False, True])
@pytest.mark.parametrize("num_asking", [1, 32])
def test_a_graph_does_what_is_done_outside(device: torch.device, num_asking: int, has_filters: bool) -> None:
    """Captured on padding, replayed on requests that ask for anything, their counts moving on."""
    case = AskingCase.random(logits_of("spread", 64, VOCAB, 3), num_asking, 3, has_filters=has_filters)
    case = case.to(device)
    inside, outside = case.lines(), case.lines()
    asked = case.asked._replace(generated=case.asked.generated.clone())

    def step(rows: torch.Tensor, places: torch.Tensor) -> tuple[torch.Tensor, ...]:
        asking_rows.sample_asking(case.logits, rows, places, asked, *inside, has_filters=has_filters)
        return ()

    pads = {"rows": 0, "places": 0}
    function = graphed(step, ladder=[num_asking], pads=pads, options=CaptureOptions(strict=True))
    function.capture(torch.zeros_like(case.rows), torch.zeros_like(case.places))
    texts = set()
    for _ in range(20):
        function(case.rows, case.places)
        asking_rows.sample_asking(
            case.logits, case.rows, case.places, case.asked, *outside, has_filters=has_filters
        )
        case.asked.lengths.add_(1)
        torch.cuda.synchronize()
        one, other = (case.amended(rows, *lines) for rows, lines in ((asked, inside), (case.asked, outside)))
        for part in ("last_tokens", "generated", "values", "tokens", "ranks"):
            assert torch.equal(getattr(one, part), getattr(other, part)), part
        assert one.line[LINE_HEAD:].tolist() == other.line[LINE_HEAD:].tolist()
        texts.add(tuple(one.line[LINE_HEAD:].tolist()))
    assert not function.report().eager_steps
    assert num_asking == 1 or len(texts) > 1


@pytest.mark.parametrize("has_filters", [False, True])
@pytest.mark.parametrize("captured", [False, True])
def test_logits_are_those_of_the_kernel_just_before(
    device: torch.device, captured: bool, has_filters: bool
) -> None:
    """Kernels read raw logits, and write, before those before them have ended."""
    case = AskingCase.random(logits_of("spread", 64, VOCAB, 4), 32, 4, has_filters=has_filters).to(device)
    turns = [case.logits, -case.logits]
    wanted = [
        AskingCase(turn, case.rows, case.places, case.asked).sampled(by_kernels=True, has_filters=has_filters)
        for turn in turns
    ]
    scores = case.logits.clone()
    generated = case.asked.generated.clone()
    asked, lines = case.asked._replace(generated=generated), case.lines()

    def run() -> None:
        scores.neg_()
        asking_rows.sample_asking(scores, case.rows, case.places, asked, *lines, has_filters=has_filters)

    if captured:
        with capture_block() as block:
            run()
        run = block.replay
    for turn in range(1, 41):
        scores.copy_(turns[1 - turn % 2])
        generated.copy_(case.asked.generated)
        torch.cuda.synchronize()
        run()
        found = case.amended(asked, *lines)
        for part in ("last_tokens", "generated", "values", "tokens", "ranks"):
            assert torch.equal(getattr(found, part), getattr(wanted[turn % 2], part)), part


def test_every_request_of_a_mixed_batch_is_as_it_is_alone(device: torch.device, tmp_path) -> None:
    """Tokens and log-probabilities; the decode graphs are those of the same size for all."""
    pytest.importorskip("transformers")
    model = TinyModel(tmp_path, "Llama")
    asked = [
        {"temperature": 0},
        {"seed": 1, "top_p": 0.7, "logprobs": 3},
        {"seed": 2, "frequency_penalty": 0.6, "presence_penalty": 0.2},
        {"temperature": 0, "logprobs": 5, "min_tokens": 6},
        {"seed": 3, "top_k": 9, "min_p": 0.02},
        {"seed": 4, "logit_bias": {0: 3.0, 7: -100.0, 130: 2.5}, "logprobs": 0},
        {"seed": 5},
        {"seed": 6, "repetition_penalty": 1.3, "top_p": 0.9, "top_k": 40},
    ]
    params = [SamplingParams(**one, max_tokens=24, ignore_eos=True) for one in asked]
    prompts = prompts_of((5, 17, 30, 9, 12, 3, 22, 8))
    options = {"max_running_requests": 8, "cuda_graph_bs": (8,), "max_model_len": 64}
    with LLM(model.directory, device="cuda", dtype="float32", **options) as llm:
        together = llm.generate(prompts, params)
        for prompt, one, output in zip(prompts, params, together, strict=True):
            [alone] = llm.generate([prompt], [one])
            ours, wanted = output.outputs[0], alone.outputs[0]
            assert ours.token_ids == wanted.token_ids, one
            assert (ours.logprobs is None) == (wanted.logprobs is None) == (one.logprobs is None)
            for mine, theirs in zip(ours.logprobs or (), wanted.logprobs or (), strict=True):
                assert mine.keys() == theirs.keys()
                for token in mine:
                    assert mine[token].rank == theirs[token].rank
                    assert mine[token].logprob == pytest.approx(theirs[token].logprob, abs=1e-3)
        assert llm.verify().passed
