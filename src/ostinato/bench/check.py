"""Checks the tokens of a benchmark against the same engine without graphs, on a small part of its requests.

Note [Near ties]
Logits of one prompt differ in the last bits between batch shapes, so where two tokens are almost equally
likely, greedy decoding may take either, and all later tokens differ. Where the tokens of a run differ from
the reference's, the reference therefore gets the run's own tokens as a prompt and computes their
probabilities: every token must be its most likely one, or within `tolerance` of it in log probability.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import torch

from ostinato.engine.llm import LLM
from ostinato.engine.parameters.sampling_params import SamplingParams

from ..tools.results import BenchError, tell
from .contest import Ours
from .subject import Subject
from .workload import Workload

REQUESTS, STEPS = 4, 16
"""How many requests and tokens of a run are checked."""

_TOLERANCE = {torch.float32: 1e-3}
_TOLERANCE_OF_HALVES = 0.25


def tokens_hash(tokens: Sequence[Sequence[int]]) -> str:
    """The first 16 hex digits of the SHA-256 of the tokens, requests separated."""
    text = "\n".join(" ".join(map(str, request)) for request in tokens)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def check_tokens(
    subject: Subject, workload: Workload, runs: Sequence[tuple[str, Sequence[Sequence[int]]]]
) -> dict[str, Any]:
    """Compare the beginning of each named run of `workload` (or of a batch that begins with its requests)
    with the engine in mode none. Raises BenchError if a token is wrong."""
    part = checked_part(workload)
    tell(f"checking {part} against mode none")
    with subject.start_reference(part) as llm:
        return compare_with(llm, subject, part, runs)


def checked_part(workload: Workload) -> Workload:
    """The part of the workload that is checked."""
    return workload.first(REQUESTS).shortened(STEPS)


def compare_with(
    reference: LLM, subject: Subject, part: Workload, runs: Sequence[tuple[str, Sequence[Sequence[int]]]]
) -> dict[str, Any]:
    """`check_tokens` with a running reference, over a `checked_part`; the reference needs room for one more
    token."""
    expected = Ours(reference).run(part).tokens
    compared = [_compared(reference, subject, part, expected, name, tokens) for name, tokens in runs]
    return {
        "reference": "the same engine, cuda_graph_mode none",
        "requests": len(part),
        "tokens_each": max(part.output_lens),
        "hash": tokens_hash(expected),
        "runs": compared,
    }


def _compared(
    llm: LLM,
    subject: Subject,
    part: Workload,
    expected: Sequence[Sequence[int]],
    name: str,
    tokens: Sequence[Sequence[int]],
) -> dict[str, Any]:
    count = min(len(tokens), len(part))
    got = [list(row[:length]) for row, length in zip(tokens[:count], part.output_lens[:count], strict=True)]
    wanted = [list(row) for row in expected[:count]]
    result: dict[str, Any] = {"run": name, "hash": tokens_hash(got), "equal": got == wanted}
    if got != wanted:
        result["largest_gap"] = max(
            _gap(llm, prompt, row)
            for prompt, row, right in zip(part.prompts, got, wanted, strict=False)
            if row != right
        )
        tolerance = _TOLERANCE.get(subject.config.dtype, _TOLERANCE_OF_HALVES)
        if result["largest_gap"] > tolerance:
            raise BenchError(
                f"{name}: the tokens are wrong: one of them is {result['largest_gap']:.3g} less likely (log "
                f"probability) than the reference's choice; {tolerance} is the limit in {subject.dtype_name}"
            )
    return result


def _gap(llm: LLM, prompt: Sequence[int], tokens: Sequence[int]) -> float:
    """By how much the least likely of `tokens`, after `prompt`, is less likely than the model's own
    choice."""
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1)
    [output] = llm.generate([{"prompt_token_ids": [*prompt, *tokens]}], params)
    if output.error is not None or output.prompt_logprobs is None:
        raise BenchError(f"the reference could not score the tokens: {output.error}")
    gaps = []
    for token, found in zip(tokens, output.prompt_logprobs[len(prompt) :], strict=True):
        assert found is not None
        gaps.append(max(entry.logprob for entry in found.values()) - found[token].logprob)
    return max(gaps)
