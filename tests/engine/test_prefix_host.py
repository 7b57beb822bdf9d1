"""What the host does for a long prompt that is in the prefix cache: nothing for each of its tokens.

Counted in instructions of Python, which are the same on any machine under any load.
"""

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
import torch

from ostinato.engine.llm import LLM
from ostinato.engine.outputs import RequestOutput
from ostinato.engine.parameters.sampling_params import SamplingParams

SHORT, LONG, NEW = 1024, 32768, 16
ONE = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
PER_PAGE = 30
"""Instructions that a page may cost in all: it is looked up, given an owner and taken from it again."""


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    directory: Path = tmp_path_factory.mktemp("long")
    fields = {"vocab_size": 131, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
    fields |= {"num_attention_heads": 1, "num_key_value_heads": 1, "max_position_embeddings": LONG + NEW}
    config = {"architectures": ["LlamaForCausalLM"], **fields}
    (directory / "config.json").write_text(json.dumps(config))
    options: dict[str, Any] = {"load_format": "dummy", "cuda_graph_mode": "none", "num_pages": LONG // 8}
    options |= {"max_running_requests": 2, "max_model_len": LONG + NEW}
    with LLM(str(directory), **options) as llm:
        runner = llm.engine.core.runner

        def without_model(step: Any) -> torch.Tensor:
            runner.has_sampled = False
            return runner.logits[: step.num_requests]

        runner.run = without_model  # type: ignore[method-assign]
        yield llm


def served(llm: LLM, prompt: list[int]) -> RequestOutput:
    output = llm.engine.add({"prompt_token_ids": prompt}, ONE)
    while not output.finished:
        llm.engine.step()
    return output


def instructions(call: Callable[[], object]) -> int:
    """Of Python, in this thread, while this runs."""
    count = 0

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal count
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        count += event == "opcode"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
    return count


def test_a_cached_prompt_costs_nothing_for_each_token(llm: LLM) -> None:
    counts = {}
    for length in (SHORT, LONG):
        shared = np.random.default_rng(length).integers(0, 131, length - NEW).tolist()
        for number in range(3):
            prompt = [*shared, *[number] * NEW]
            outputs: list[RequestOutput] = []
            counts[length] = instructions(lambda: outputs.append(served(llm, prompt)))  # noqa: B023
            assert outputs[0].num_cached_tokens == (length - NEW if number else 0)
    per_page = (counts[LONG] - counts[SHORT]) / ((LONG - SHORT) / 16)
    assert per_page < PER_PAGE, counts


def test_the_ids_of_a_prompt_are_a_list_of_integers_whatever_was_given(llm: LLM) -> None:
    given: list[Any] = [[3, 1, 4], (3, 1, 4), np.array([3, 1, 4]), np.array([3, 1, 4], dtype=np.uint8)]
    given += [torch.tensor([3, 1, 4]), [np.int64(3), True, 4], iter([3, 1, 4])]
    for ids in given:
        output = llm.engine.add({"prompt_token_ids": ids}, ONE)
        assert output.prompt_token_ids == [3, 1, 4]
        assert all(type(token) is int for token in output.prompt_token_ids)
        assert output.prompt_token_ids is output.prompt_token_ids
        assert output.snapshot().prompt_token_ids is output.prompt_token_ids
        llm.engine.abort(output.request_id)


def test_what_the_caller_does_to_the_ids_later_changes_nothing(llm: LLM) -> None:
    for mutable in ([3, 1, 4], np.array([3, 1, 4])):
        output = llm.engine.add({"prompt_token_ids": mutable}, ONE)
        mutable[0] = 9
        assert output.prompt_token_ids == [3, 1, 4]
        llm.engine.abort(output.request_id)


@pytest.mark.parametrize("ids", [[2**70], [-1], [2**31], np.array([[1]]), np.array([1.0]), [1, 2.0], b"12"])
def test_what_is_no_token_id_is_refused(llm: LLM, ids: Any) -> None:
    [output] = llm.generate([{"prompt_token_ids": ids}], ONE)
    assert "prompt_token_ids must be" in (output.error or "")
