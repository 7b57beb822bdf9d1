"""Top-k, top-p and min-p on the GPU: cuts without a sort, and what is drawn behind them."""

from dataclasses import replace

import pytest
import torch

from engine.conftest import TinyModel, prompts_of
from kernels.asking_checks import AskingCase
from kernels.filter_checks import KINDS, Filtering, check_cuts, logits_of
from kernels.test_sampling import assert_follows
from ostinato import LLM, SamplingParams
from ostinato.kernels.sampling import filters
from ostinato.kernels.sampling.token_lines import LINE_HEAD

VOCAB = 151_936


@pytest.mark.parametrize("kind", KINDS)
def test_cuts_of_a_real_vocabulary(device, kind):
    check_cuts(Filtering.random(logits_of(kind, 24, VOCAB), seed=1).to(device))


@pytest.mark.parametrize("vocab", [1, 100, 5001, 32_000])
def test_cuts_of_any_vocabulary(device, vocab):
    for kind in ("spread", "ties"):
        check_cuts(Filtering.random(logits_of(kind, 40, vocab), seed=vocab).to(device))


def test_the_same_cuts_on_every_device_where_rounding_decides_nothing(device):
    case = Filtering.random(logits_of("ties", 64, 5001), seed=4)
    case = replace(case, top_p=torch.ones_like(case.top_p), min_p=torch.zeros_like(case.min_p))
    filters_of_case = (case.temperature, case.top_k, case.top_p, case.min_p)
    wanted = filters.reference(case.logits, *filters_of_case)
    found = case.to(device).cuts()
    assert torch.equal(
        filters.is_kept(case.logits, *wanted), filters.is_kept(case.logits, *(cut.cpu() for cut in found))
    )


def test_a_cut_does_not_depend_on_the_rows_beside_it(device):
    together = Filtering.random(logits_of("flat", 200, 20_000), seed=6).to(device)
    value, last = together.cuts()
    for row in range(0, 200, 17):
        alone = Filtering(*(tensor[row : row + 1].clone() for tensor in vars(together).values()))
        assert alone.cuts() == (value[row], last[row])


@pytest.mark.parametrize(
    ("top_k", "top_p", "min_p"),
    [(7, 1.0, 0.0), (0, 0.8, 0.0), (20, 0.9, 0.02), (0, 1.0, 0.1), (300, 0.95, 0.0)],
)
def test_draws_follow_the_filtered_distribution(device, top_k, top_p, min_p):
    n, vocab = 20_000, 1000
    row = logits_of("spread", 1, vocab, seed=5).to(device)
    case = Filtering(
        row,
        torch.tensor([1.3], device=device),
        torch.tensor([top_k], dtype=torch.int32, device=device),
        torch.tensor([top_p], device=device),
        torch.tensor([min_p], device=device),
    )
    many = Filtering(*(tensor.expand(n, *tensor.shape[1:]) for tensor in vars(case).values()))
    positions = torch.arange(n + 1, dtype=torch.int32, device=device)
    asked = many.asked(lengths=positions, seeds=torch.full((n + 1,), 77, device=device))
    amended = AskingCase(many.logits, positions[1:], positions[:-1], asked).sampled(by_kernels=True)
    tokens = amended.line[LINE_HEAD:]
    left = filters.is_kept(row, *case.cuts())
    wanted = (row.double() / 1.3).masked_fill(~left, float("-inf")).softmax(-1)[0]
    assert_follows(torch.bincount(tokens, minlength=vocab), wanted.cpu())


@pytest.mark.parametrize("num_rows", [3, 200])
def test_programs_meet_while_others_keep_the_gpu_busy(device, num_rows):
    """Rows of a real vocabulary that all have to be cut, by more programs than the GPU holds."""
    case = Filtering.random(logits_of("flat", num_rows, VOCAB), seed=3).to(device)
    case = replace(case, temperature=case.temperature.clamp(min=0.5), top_p=case.top_p.clamp(max=0.9))
    wanted = case.cuts()
    other, work = torch.cuda.Stream(), torch.randn(4096, 4096, device=device)
    for _ in range(20):
        with torch.cuda.stream(other):
            for _ in range(8):
                work = (work @ work).clamp(-1, 1)
        for found, once in zip(case.cuts(), wanted, strict=True):
            assert torch.equal(found, once)
    torch.cuda.synchronize()


def test_top_k_of_one_is_greedy_and_filters_leave_logprobs_alone(device, tmp_path):
    pytest.importorskip("transformers")
    model = TinyModel(tmp_path, "Llama")
    prompts = prompts_of((5, 30, 17))
    asked = {"max_tokens": 12, "logprobs": 5}
    with LLM(
        model.directory, device="cuda", dtype="float32", max_running_requests=4, max_model_len=64
    ) as llm:
        greedy = llm.generate(prompts, SamplingParams(temperature=0, **asked))
        for filters_on in ({"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}):
            params = SamplingParams(temperature=5.0, seed=3, **filters_on, **asked)
            for ours, wanted in zip(llm.generate(prompts, params), greedy, strict=True):
                assert ours.outputs[0].token_ids == wanted.outputs[0].token_ids
                assert ours.outputs[0].logprobs == wanted.outputs[0].logprobs
