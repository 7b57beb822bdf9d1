"""What the host does for a long prompt that is in the prefix cache: nothing for each of its tokens.

Counted in instructions of Python, which are the same on any machine under any load.
"""

import json
import sys
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
import torch

from ostinato.cache.pages import PageAllocator
from ostinato.engine.llm import LLM
from ostinato.engine.outputs import RequestOutput
from ostinato.engine.parameters.sampling_params import RequestError, SamplingParams
from ostinato.engine.scheduling.request import Request
from ostinato.engine.token_ids import token_array

SHORT, LONG, NEW = 1024, 32768, 16
ONE = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
PER_PAGE = 30
"""Instructions that a page may cost in all: it is looked up, given an owner and taken from it again."""
PER_NEW_PAGE = 140
"""The same of one that is new."""


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


def test_a_prompt_alone_costs_nothing_for_each_token_either(llm: LLM) -> None:
    """Not in a dictionary: it has to be told from a list of prompts."""
    counts = {}
    for length in (SHORT, LONG):
        prompt = np.random.default_rng(length).integers(0, 131, length).tolist()
        counts[length] = instructions(lambda: llm.enqueue(prompt, ONE))  # noqa: B023
    llm.wait_for_completion()
    assert (counts[LONG] - counts[SHORT]) / (LONG - SHORT) < 0.1, counts


def test_a_new_page_costs_little() -> None:
    """It is taken from others, and found from then on."""
    pages = PageAllocator(LONG // 16 + 1)
    counts = {}
    for count in (SHORT // 16, LONG // 16):
        for number in range(2):
            ids = np.random.default_rng(number).integers(0, 131, count * 16)
            contents = pages.contents(ids)

            def serve(contents: list[bytes] = contents) -> None:
                pages.free(pages.commit_row(pages.allocate(len(contents)), 0, contents))

            counts[count] = instructions(serve)
        assert len(pages.match([*ids, 0])) == count
        pages.flush()
    per_page = (counts[LONG // 16] - counts[SHORT // 16]) / (LONG // 16 - SHORT // 16)
    assert per_page < PER_NEW_PAGE, counts


@pytest.mark.parametrize("ids", [[1, True], [1, 2.0], [1, "a"], [True, 1], [1, [2]], [1, torch.tensor(2)]])
def test_a_list_with_something_else_among_its_numbers_is_no_prompt(llm: LLM, ids: list[Any]) -> None:
    """But a list of them, and numbers and flags are no prompts."""
    outputs = llm.generate(ids, ONE)
    assert len(outputs) == 2
    assert any("a prompt must be a string or" in (output.error or "") for output in outputs)


@pytest.mark.parametrize(
    "mask", [[True, False], (True, True), np.array([True, False]), torch.tensor([True, False])], ids=repr
)
def test_a_mask_in_the_place_of_token_ids_is_refused(llm: LLM, mask: Any) -> None:
    """It would pass for the tokens 1 and 0."""
    with pytest.raises(RequestError, match="must be a list of integers"):
        llm.generate({"prompt_token_ids": mask}, ONE)


@pytest.mark.parametrize("long", [1023, 1024, 1025, 5000])
@pytest.mark.parametrize("last", [2**31, -1, 2**63, 1.5, None])
def test_one_that_is_no_token_id_behind_many_that_are(long: int, last: Any) -> None:
    assert token_array([3] * long).tolist() == [3] * long
    assert token_array([3] * long).dtype == np.int32
    wrong = [*[3] * long, last]
    if isinstance(last, int) and last < 2**63:
        assert token_array(wrong).tolist() == wrong
        assert token_array(np.array(wrong)).tolist() == wrong
        assert token_array(wrong).dtype == np.int64
    else:
        with pytest.raises(OverflowError if isinstance(last, int) else TypeError):
            token_array(wrong)


def test_the_ids_of_a_prompt_are_a_list_of_integers_whatever_was_given(llm: LLM) -> None:
    given: list[Any] = [[3, 1, 4], (3, 1, 4), np.array([3, 1, 4]), np.array([3, 1, 4], dtype=np.uint8)]
    given += [torch.tensor([3, 1, 4]), [np.int64(3), True, 4], iter([3, 1, 4]), array("i", [3, 1, 4])]
    given += [torch.tensor([3, 1, 4], dtype=torch.int32), torch.tensor([[3], [1], [4]])]
    for ids in given:
        output = llm.engine.add({"prompt_token_ids": ids}, ONE)
        assert output.prompt_token_ids == [3, 1, 4]
        assert all(type(token) is int for token in output.prompt_token_ids)
        assert output.prompt_token_ids is output.prompt_token_ids
        assert output.snapshot().prompt_token_ids is output.prompt_token_ids
        llm.engine.abort(output.request_id)


def test_what_the_caller_does_to_the_ids_later_changes_nothing(llm: LLM) -> None:
    mutables: list[Any] = [[3, 1, 4], np.array([3, 1, 4]), np.array([3, 1, 4], dtype=np.int32)]
    mutables += [torch.tensor([3, 1, 4]), torch.tensor([3, 1, 4], dtype=torch.int32), array("i", [3, 1, 4])]
    for mutable in mutables:
        output = llm.engine.add({"prompt_token_ids": mutable}, ONE)
        mutable[0] = 9
        assert output.prompt_token_ids == [3, 1, 4]
        llm.engine.abort(output.request_id)


REFUSED: list[Any] = [[2**70], [-1], [2**31], [2**32], np.array([[1]]), np.array([1.0]), [1, 2.0], b"12"]
REFUSED += [np.array([-1], dtype=np.int32), np.array([2**31]), torch.tensor([-1]), torch.tensor([1.0])]


@pytest.mark.parametrize("ids", REFUSED)
def test_what_is_no_token_id_is_refused(llm: LLM, ids: Any) -> None:
    [output] = llm.generate([{"prompt_token_ids": ids}], ONE)
    assert "prompt_token_ids must be" in (output.error or "")


def test_an_array_that_looks_checked_is_looked_at_by_the_engine(llm: LLM) -> None:
    """A request takes what is read-only as it is."""
    ids = np.array([3, -1, 4], dtype=np.int32)
    ids.setflags(write=False)
    with pytest.raises(RequestError, match="outside the model's vocabulary"):
        llm.engine.core.add(Request("negative", ids, ONE))
