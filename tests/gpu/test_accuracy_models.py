"""Whole models in bf16 at many batch sizes and contexts: log-probabilities as good as those of transformers.

`test_engine_full_size` compares a batch of 8 with contexts of some hundred tokens, against float32. Here one
engine a model decodes batches of 1 to 256 and contexts up to 32k, from graphs. The truth is transformers in
float64 on the same weights (its norms stay in float32), attention in pieces, since the scores of a whole
layer would take 137 GB.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from engine.expected_steps import service_of
from engine.model_shapes import Checkpoint
from gpu.test_engine_full_size import checkpoint  # noqa: F401
from ostinato import LLM, SamplingParams
from ostinato.engine.outputs import RequestOutput

pytest.importorskip("transformers")

RATIO = 1.5
TOKENS = 4
LENGTHS = (17, 48, 100)
"""Of the prompts of a batch, in turn."""
QUERIES_AT_ONCE = 512
"""In float64: two gigabytes of scores over 32k keys of 16 heads."""
PARAMS = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True, logprobs=20)


@pytest.fixture(scope="module")
def llm(checkpoint: Checkpoint) -> Iterator[LLM]:  # noqa: F811
    """An engine with all the room that the tests here need."""
    with LLM(
        str(checkpoint.directory),
        device="cuda",
        dtype="bfloat16",
        max_running_requests=256,
        max_model_len=32_800,
        num_pages=2200,
        chunked_prefill_size=2048,
        enable_prefix_caching=False,
        cuda_graph_bs=(1, 2, 4, 8, 16, 32, 64, 128, 256),
        cuda_graph_prefill_tokens=(64, 512, 2048),
    ) as engine:
        yield engine


@pytest.mark.parametrize("batch_size", [1, 3, 8, 16, 32, 64, 128, 256])
def test_batches(checkpoint, llm, batch_size):  # noqa: F811
    check(checkpoint, llm, [LENGTHS[index % len(LENGTHS)] for index in range(batch_size)])


@pytest.mark.parametrize(
    ("batch_size", "context"), [(1, 1), (1, 257), (3, 1000), (1, 4097), (3, 8000), (1, 32_768 - TOKENS)]
)
def test_contexts(checkpoint, llm, batch_size, context):  # noqa: F811
    check(checkpoint, llm, [context] * batch_size)


def check(checkpoint: Checkpoint, llm: LLM, lengths: Sequence[int]) -> None:  # noqa: F811
    """Decode greedily and compare the log-probabilities of the 20 best tokens of every step."""
    eager_before = sum(service_of(llm).eager.values())
    outputs = llm.generate(checkpoint.prompts(lengths, seed=len(lengths)), PARAMS)
    assert sum(service_of(llm).eager.values()) == eager_before, "a step ran without a graph"
    ours, exact, theirs = [], [], []
    for length in set(lengths):
        group = [output for output in outputs if len(output.prompt_token_ids) == length]
        chosen, values = best_tokens(group)
        ours.append(values.flatten())
        ids = torch.tensor([[*output.prompt_token_ids, *output.outputs[0].token_ids] for output in group])
        for dtype, found in ((torch.float64, exact), (torch.bfloat16, theirs)):
            logprobs = reference(checkpoint, ids, dtype)
            found.append(logprobs.gather(2, chosen.to(logprobs.device)).flatten().double().cpu())
    errors = [
        (torch.cat(found).double() - torch.cat(exact)).square().mean().sqrt().item()
        for found in (ours, theirs)
    ]
    print(f"{len(lengths)} x {max(lengths)}: rms error ours {errors[0]:.2e}, transformers {errors[1]:.2e}")
    assert errors[0] <= RATIO * errors[1], f"ours {errors[0]:.2e}, transformers {errors[1]:.2e}"


def best_tokens(outputs: Sequence[RequestOutput]) -> tuple[Tensor, Tensor]:
    """(ids, log-probabilities) [requests, TOKENS, 20] that the engine returned."""
    ids, values = [], []
    for output in outputs:
        found = output.outputs[0].logprobs
        assert found is not None
        assert len(found) == TOKENS
        ids.append([list(step)[:20] for step in found])
        values.append([[step[token].logprob for token in list(step)[:20]] for step in found])
    return torch.tensor(ids), torch.tensor(values)


@torch.no_grad()
def reference(checkpoint: Checkpoint, ids: Tensor, dtype: torch.dtype) -> Tensor:  # noqa: F811
    """Log-probabilities [requests, TOKENS, vocabulary] of the last tokens of ids, by transformers."""
    model, results = checkpoint.reference, []
    at_once = max(1, 16_384 // ids.size(1)) if ids.size(1) < 4096 else 1
    exactly = dtype == torch.float64
    with cast(model, dtype), attention_in_pieces() if exactly else nullcontext():
        for some in ids.to(checkpoint.device).split(at_once):
            logits = model(some, logits_to_keep=TOKENS + 1, use_cache=False).logits[:, :-1]
            results.append(logits.to(torch.promote_types(dtype, torch.float32)).log_softmax(-1))
    return torch.cat(results)


@contextmanager
def attention_in_pieces() -> Iterator[None]:
    """Causal attention of transformers in plain products, some queries at a time, in the precision of q."""

    def attend(q: Tensor, k: Tensor, v: Tensor, scale: float | None = None, **options: object) -> Tensor:
        assert options.get("attn_mask") is None, "prompts of a batch are equally long: nothing to mask"
        assert options.get("is_causal"), "only whole sequences are computed here"
        group, length = q.size(1) // k.size(1), q.size(2)
        k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
        positions = torch.arange(length, device=q.device)
        pieces = []
        for queries in positions.split(QUERIES_AT_ONCE):
            end = int(queries[-1]) + 1
            scores = q[:, :, queries] @ k[:, :, :end].transpose(2, 3) * (scale or q.size(3) ** -0.5)
            hidden = positions[:end] > queries.unsqueeze(1)
            pieces.append(scores.masked_fill(hidden, float("-inf")).softmax(-1) @ v[:, :, :end])
        return torch.cat(pieces, dim=2)

    with patch.object(functional, "scaled_dot_product_attention", attend):
        yield


@contextmanager
def cast(model: torch.nn.Module, dtype: torch.dtype) -> Iterator[None]:
    """Parameters in `dtype` for a while; the weights are numbers of bf16, so nothing is lost on the way."""
    before = torch.float32
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    try:
        yield
    finally:
        for parameter in model.parameters():
            parameter.data = parameter.data.to(before)
