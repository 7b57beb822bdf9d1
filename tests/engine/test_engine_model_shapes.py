"""Qwen3-0.6B and Llama-3.2-1B with random weights against transformers: scaled down here, whole on a GPU.

`tests/gpu/test_engine_full_size.py` runs the tests of this file again on checkpoints of full size.
"""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from ostinato.engine.llm import LLM
from ostinato.engine.outputs import Logprob, RequestOutput
from ostinato.engine.parameters.sampling_params import SamplingParams

from .expected_steps import Setup, sampling_of, service_of
from .greedy_reference import TIE, assert_greedy
from .model_shapes import SHAPES, Checkpoint, config_of
from .test_engine_greedy import assert_all_back

LENGTHS = (1, 300, 7, 120, 64, 33, 17, 200) if torch.cuda.is_available() else (1, 290, 7, 33)
TOKENS = 32
GREEDY = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
SETUP = Setup(
    decode_rungs=(1, 2, 4, 8),
    token_rungs=(8, 64, 256),
    running=8,
    budget=256,
    length=400,
    pages=220,
    caching=False,
    ahead=1,
)
BF16_ERROR_RATIO = 1.5
"""Root mean square error of our bf16 log-probabilities, at most so many times that of transformers in bf16,
both against transformers in float32 on the same weights."""


# A CPU computes bf16 a hundred times slower than float32; the GPU suite runs all of this in full size.
@pytest.fixture(scope="module", params=[pytest.param(name, marks=pytest.mark.slow) for name in SHAPES])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """A model of one of the shapes, its width, depth and vocabulary scaled down."""
    directory = tmp_path_factory.mktemp(request.param)
    return Checkpoint.make(directory, config_of(request.param, scaled=True), torch.device("cpu"))


@pytest.fixture(autouse=True)
def full_float32() -> Iterator[None]:
    """Products of float32 in float32, in transformers and in ours."""
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    before = matmul.allow_tf32, cudnn.allow_tf32
    matmul.allow_tf32 = cudnn.allow_tf32 = False
    yield
    matmul.allow_tf32, cudnn.allow_tf32 = before


def engine(checkpoint: Checkpoint, setup: Setup, dtype: str) -> LLM:
    device = checkpoint.device.type
    return LLM(str(checkpoint.directory), device=device, dtype=dtype, **setup.options)


def serve(
    llm: LLM, setup: Setup, prompts: list[dict[str, list[int]]], params: SamplingParams
) -> list[RequestOutput]:
    """The outputs, from exactly the graphs and reasons that the mode promises."""
    before, before_sampling = service_of(llm), sampling_of(llm)
    outputs = llm.generate(prompts, params)
    assert [output.error for output in outputs] == [None] * len(prompts)
    lengths = [len(prompt["prompt_token_ids"]) for prompt in prompts]
    steps = setup.steps(lengths, TOKENS)
    assert service_of(llm).since(before) == setup.service(steps)
    is_plain = params.logprobs is None
    assert sampling_of(llm).since(before_sampling) == setup.sampling(steps, is_plain=is_plain)
    assert_all_back(llm)
    return outputs


@pytest.mark.parametrize("mode", ["full-and-piecewise", "full", "none"])
def test_tokens_equal_transformers_in_float32(checkpoint: Checkpoint, mode: str) -> None:
    setup = replace(SETUP, mode=mode)
    prompts = checkpoint.prompts(LENGTHS)
    with engine(checkpoint, setup, "float32") as llm:
        together = serve(llm, setup, prompts, GREEDY)
        one_by_one = [serve(llm, setup, [prompt], GREEDY)[0] for prompt in prompts[:3]]
    ties = 0
    for prompt, output in zip([*prompts, *prompts[:3]], [*together, *one_by_one], strict=True):
        ids, tokens = prompt["prompt_token_ids"], output.outputs[0].token_ids
        assert len(tokens) == TOKENS
        tied = assert_greedy(checkpoint.reference, ids, tokens)
        # Where a tie was decided the other way, the texts part; else they are the same to the end.
        assert (
            tied or tokens == checkpoint.generated(ids, TOKENS) or _parted_at_a_tie(checkpoint, ids, tokens)
        )
        ties += tied
    assert ties <= 3, "ties are rare with random weights"
    texts = [tuple(output.outputs[0].token_ids) for output in together]
    assert len(set(texts)) == len(texts), "the prompts do not matter: nothing is proven"


def _parted_at_a_tie(checkpoint: Checkpoint, ids: list[int], tokens: list[int]) -> bool:
    """Whether `generate` of transformers, which computes a token at a time, lost a tie to its own forward."""
    generated = checkpoint.generated(ids, TOKENS)
    at = next(at for at, (a, b) in enumerate(zip(tokens, generated, strict=True)) if a != b)
    row = checkpoint.logprobs([*ids, *tokens[:at]], torch.float32)[-1]
    return abs((row[tokens[at]] - row[generated[at]]).item()) <= TIE


def test_log_probabilities_in_bfloat16_are_as_good_as_those_of_transformers(checkpoint: Checkpoint) -> None:
    params = replace(GREEDY, logprobs=20, prompt_logprobs=20)
    with engine(checkpoint, SETUP, "bfloat16") as llm:
        outputs = serve(llm, SETUP, checkpoint.prompts(LENGTHS), params)
    of_prompts, of_tokens = Errors(), Errors()
    for output in outputs:
        completion = output.outputs[0]
        assert output.prompt_logprobs is not None
        assert completion.logprobs is not None
        ids = [*output.prompt_token_ids, *completion.token_ids]
        exact, theirs = (checkpoint.logprobs(ids, dtype) for dtype in (torch.float32, torch.bfloat16))
        for at, ours in enumerate(output.prompt_logprobs[1:]):
            assert ours is not None
            of_prompts.add(ours, exact[at], theirs[at])
        for at, ours in enumerate(completion.logprobs, start=len(output.prompt_token_ids) - 1):
            of_tokens.add(ours, exact[at], theirs[at])
    for name, errors in (("prompt", of_prompts), ("decode", of_tokens)):
        our_error, their_error = errors.root_mean_squares()
        print(f"{name}: rms error in bf16: ours {our_error:.2e}, transformers {their_error:.2e}")
        assert our_error <= BF16_ERROR_RATIO * their_error, name


class Errors:
    """Log-probabilities of ours and of transformers in bf16, each against float32."""

    def __init__(self) -> None:
        self._ours: list[float] = []
        self._theirs: list[float] = []

    def add(self, ours: dict[int, Logprob], exact: torch.Tensor, theirs: torch.Tensor) -> None:
        """The tokens of one position."""
        tokens = list(ours)
        wanted = exact[tokens].tolist()
        self._ours += [ours[token].logprob - value for token, value in zip(tokens, wanted, strict=True)]
        self._theirs += (theirs[tokens] - exact[tokens]).tolist()

    def root_mean_squares(self) -> tuple[float, float]:
        """Of ours and of theirs."""
        assert len(self._ours) > 1000
        ours, theirs = torch.tensor(self._ours), torch.tensor(self._theirs)
        return ours.square().mean().sqrt().item(), theirs.square().mean().sqrt().item()


# A CPU attends inside a full graph by another computation than outside: only piecewise has the same.
BITWISE_MODES = ["full", "full-and-piecewise", "piecewise"] if torch.cuda.is_available() else ["piecewise"]


def eager_answers(
    checkpoint: Checkpoint, prompts: list[dict[str, list[int]]], params: SamplingParams, *, as_mixed: bool
) -> list[RequestOutput]:
    """Without graphs; `as_mixed`: decode takes the path of mixed batches, as piecewise graphs do."""
    with engine(checkpoint, replace(SETUP, mode="none"), "bfloat16") as llm:
        runner = llm.engine.core.runner
        shape_of = runner.shape_of
        if as_mixed:
            runner.shape_of = lambda step: replace(shape_of(step), query_len=None)
        answers = llm.generate(prompts, params)
        assert service_of(llm).eager == {"disabled": TOKENS}
    return answers


def test_graphs_and_eager_agree_bit_for_bit_in_bfloat16(checkpoint: Checkpoint) -> None:
    """Batches that fill their graphs: the eager step has the same shape."""
    prompts = checkpoint.prompts([32] * 8, seed=6)  # one step of 256 tokens, then 31 of 8
    params = replace(GREEDY, logprobs=20)
    for mode in BITWISE_MODES:
        eager = eager_answers(checkpoint, prompts, params, as_mixed=mode == "piecewise")
        setup = replace(SETUP, mode=mode)
        with engine(checkpoint, setup, "bfloat16") as llm:
            replayed = serve(llm, setup, prompts, params)
            assert sum(service_of(llm).replays.values()) == TOKENS
            assert llm.graph_report().padding_waste == 0
        for ours, expected in zip(replayed, eager, strict=True):
            assert ours.outputs[0].token_ids == expected.outputs[0].token_ids, mode
            assert ours.outputs[0].logprobs == expected.outputs[0].logprobs, mode
