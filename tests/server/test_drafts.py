"""Drafts behind a real server: the answers of one without, and what each answer tells about its drafts."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from .server_process import ServerProcess

DRAFTS: dict[str, Any] = {
    "method": "ngram",
    "num_speculative_tokens": 3,
    "prompt_lookup_min": 1,
    "prompt_lookup_max": 3,
    "disable_adaptive": True,
}
TEXT = "abcdefghijklmnopqrstuvwxyz ab"
"""The model counts on, and has seen how that goes."""
GREEDY: dict[str, Any] = {"prompt": TEXT, "max_tokens": 40, "temperature": 0}


@pytest.fixture(scope="module")
def drafting(model: Path) -> Iterator[ServerProcess]:
    flags = ("--speculative-config", json.dumps(DRAFTS), "--per-request-spec-decode-metrics", "detailed")
    with ServerProcess(model, *flags) as server:
        yield server


def chunks_of(server: ServerProcess, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    text = server.post(path, {**body, "stream": True}).text
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"temperature": 1.5, "seed": 3},
        {"temperature": 1.0, "seed": 4, "top_k": 5, "top_p": 0.9},
        {"stop": ["jkl"]},
        {"n": 2, "temperature": 1.2, "seed": 5},
        {"logprobs": 2},
        {"max_tokens": 1},
    ],
    ids=lambda more: "-".join(more) or "greedy",
)
def test_answers_are_those_without_drafts(
    server: ServerProcess, drafting: ServerProcess, more: dict[str, Any]
) -> None:
    plain, drafted = (
        each.post("/v1/completions", {**GREEDY, **more}).json()["choices"] for each in (server, drafting)
    )
    assert [(choice["text"], choice["finish_reason"]) for choice in drafted] == [
        (choice["text"], choice["finish_reason"]) for choice in plain
    ]


def check(answer: dict[str, Any], *, accepts: bool) -> None:
    """The figures of one answer, or of the last chunk of a stream, go together."""
    told, num_tokens = answer["metrics"]["speculative_decoding"], answer["usage"]["completion_tokens"]
    drafted, accepted = told["per_step_drafted"], told["per_step_accepted"]
    assert told["num_spec_steps"] == len(drafted) == len(accepted) == sum(told["acceptance_histogram"]) > 0
    assert told["num_draft_tokens"] == sum(drafted)
    assert told["num_accepted_draft_tokens"] == sum(accepted)
    assert (sum(accepted) > 0) == accepts
    assert told["draft_acceptance_rate"] == sum(accepted) / sum(drafted)
    assert told["mean_acceptance_length"] == 1 + sum(accepted) / len(accepted)
    assert told["num_spec_tokens"] == 3 == len(told["acceptance_histogram"]) - 1
    # The first token needs no draft, the last step may bring more than is wanted, or an end.
    brought = 1 + len(accepted) + sum(accepted)
    assert num_tokens <= brought <= num_tokens + 4


def test_an_answer_tells_what_drafts_brought_it(drafting: ServerProcess) -> None:
    # What the model greets with was not said before.
    chat = {"messages": [{"role": "user", "content": TEXT}], "max_tokens": 30, "temperature": 0}
    for path, body, accepts in (("/v1/completions", GREEDY, True), ("/v1/chat/completions", chat, False)):
        check(drafting.post(path, body).json(), accepts=accepts)
        chunks = chunks_of(drafting, path, {**body, "stream_options": {"include_usage": True}})
        assert ["metrics" in chunk for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
        check(chunks[-1], accepts=accepts)


def test_sglangs_answers_tell_it_too(drafting: ServerProcess) -> None:
    sampling = {"max_new_tokens": 40, "temperature": 0}
    about = drafting.post("/generate", {"text": TEXT, "sampling_params": sampling}).json()["meta_info"]
    assert about["spec_accept_token_num"] > 0
    assert about["spec_accept_rate"] == about["spec_accept_token_num"] / about["spec_draft_token_num"]
    assert about["spec_accept_length"] == 1 + about["spec_accept_token_num"] / about["spec_verify_ct"]


def test_nothing_is_told_where_there_is_nothing(server: ServerProcess, drafting: ServerProcess) -> None:
    assert "metrics" not in drafting.post("/v1/completions", {**GREEDY, "n": 2}).json()
    assert "metrics" not in drafting.post("/v1/completions", {**GREEDY, "logprobs": 1}).json()
    assert "metrics" not in server.post("/v1/completions", GREEDY).json()
