"""What drafts brought is told by `LLM`, by vLLM's metrics and by those of the server, the same everywhere."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from ostinato.engine.llm import LLM
from ostinato.engine.parameters.sampling_params import SamplingParams
from ostinato.engine.speculating.counts import SpeculationReport
from ostinato.server.engine_process.intake import Intake
from ostinato.server.engine_process.statistics import StatisticsTaker
from ostinato.server.metrics.exposition import ServerCollector
from ostinato.server.metrics.live import _readable
from ostinato.server.wire.messages import DraftCounters, decode_event, encode

from . import walks


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[LLM, SpeculationReport]]:
    """An engine, and what it says after two requests."""
    place = tmp_path_factory.mktemp("walks")
    asked = {
        "method": "eagle3",
        "model": walks.save_draft("eagle3", place / "draft"),
        "num_speculative_tokens": 3,
    }
    small: dict[str, Any] = {"max_model_len": 64, "max_running_requests": 2, "chunked_prefill_size": 16}
    small |= {"cuda_graph_bs": (2,), "cuda_graph_prefill_tokens": (16,), "num_pages": 20}
    small |= {"enable_sleep_mode": True, "hostile_wake": True}
    target = walks.save_target(place / "target")
    with LLM(target, speculative_config={**asked, "disable_adaptive": True}, **small) as made:
        plain = SamplingParams(temperature=0, max_tokens=30)
        counted = SamplingParams(temperature=0, max_tokens=5, logprobs=1)
        made.generate({"prompt_token_ids": [3, 4]}, plain, use_tqdm=False)
        made.generate({"prompt_token_ids": [3, 4]}, counted, use_tqdm=False)
        report = made.speculation_report()
        assert report is not None
        yield made, report


@pytest.fixture
def llm(served: tuple[LLM, SpeculationReport]) -> LLM:
    return served[0]


def test_a_report_says_what_drafts_brought_and_where_there_were_none(
    served: tuple[LLM, SpeculationReport],
) -> None:
    _, report = served
    found = report.drafts
    assert found.num_draft_tokens == 3 * found.num_drafts
    # The first token is the prompt's; a bunch may reach beyond the end.
    assert 29 <= found.num_drafts + found.num_accepted_tokens <= 32
    assert report.single_requests == {"logprobs": 1}
    assert sum(report.steps_without.values()) > 0
    assert f"{found.mean_acceptance_length:.2f} tokens a step" in str(report)


def test_a_request_is_told_what_drafts_brought_it(llm: LLM) -> None:
    prompt, params = {"prompt_token_ids": [3, 4]}, SamplingParams(temperature=0, max_tokens=30)
    alone = llm.generate(prompt, params, use_tqdm=False)[0].metrics
    assert alone is not None
    found = alone.speculative_decoding
    assert found is not None
    # The first token is the prompt's; a bunch may reach beyond the end.
    assert 29 <= found.num_spec_steps + found.num_accepted_tokens <= 32
    assert found.num_draft_tokens == 3 * found.num_spec_steps
    assert found.mean_acceptance_length == pytest.approx(1 + 3 * found.draft_acceptance_rate)
    two = llm.generate(prompt, SamplingParams(temperature=0, max_tokens=30, n=2), use_tqdm=False)[0].metrics
    assert two is not None
    assert two.speculative_decoding is not None
    assert two.speculative_decoding.num_spec_steps == 2 * found.num_spec_steps
    single = llm.generate(prompt, SamplingParams(temperature=0, max_tokens=3, logprobs=1), use_tqdm=False)[0]
    assert single.metrics is not None
    assert single.metrics.speculative_decoding is None


def test_metrics_of_vllm_have_their_names(llm: LLM) -> None:
    report = llm.speculation_report()
    assert report is not None
    values = {
        metric.name: getattr(metric, "value", getattr(metric, "values", None)) for metric in llm.get_metrics()
    }
    assert values["vllm:spec_decode_num_drafts"] == report.drafts.num_drafts
    assert values["vllm:spec_decode_num_accepted_tokens"] == report.drafts.num_accepted_tokens
    assert values["vllm:spec_decode_num_accepted_tokens_per_pos"] == list(report.drafts.accepted_per_position)


def test_metrics_of_the_server_say_the_same(llm: LLM) -> None:
    report = llm.speculation_report()
    assert report is not None
    statistics = decode_event(
        encode(
            StatisticsTaker(llm, Intake(llm.engine.core.scheduler, lambda group, number: None, None)).take()
        )
    )
    drafts = statistics.drafts
    assert isinstance(drafts, DraftCounters)
    assert _readable(statistics)["drafts"]["method"] == "eagle3"
    service: Any = SimpleNamespace(config=SimpleNamespace(metrics_prefix="vllm"), model_name="walks")
    found = {
        (sample.name, sample.labels.get("position") or sample.labels.get("reason")): sample.value
        for metric in ServerCollector(service)._drafts(drafts)
        for sample in metric.samples
    }
    assert found["vllm:spec_decode_num_drafts_total", None] == report.drafts.num_drafts
    assert (
        found["vllm:spec_decode_num_accepted_tokens_per_pos_total", "2"]
        == report.drafts.accepted_per_position[2]
    )
    assert found["vllm:spec_accept_length", None] == report.drafts.mean_acceptance_length
    assert ("ostinato:steps_without_drafts_total", "no request can accept drafts") in found


def test_a_draft_comes_back_from_sleep_even_where_weights_are_dropped(llm: LLM) -> None:
    def accepted() -> float:
        before = llm.speculation_report()
        output = llm.generate({"prompt_token_ids": [9, 21]}, SamplingParams(temperature=0, max_tokens=30))
        assert output[0].outputs[0].token_ids == walks.walk(21, 30)
        after = llm.speculation_report()
        assert before is not None
        assert after is not None
        return after.drafts.num_accepted_tokens - before.drafts.num_accepted_tokens

    awake = accepted()
    assert awake > 8
    for level in (1, 2):
        llm.sleep(level)
        llm.wake_up()
        if level == 2:
            llm.update_weights(str(llm.engine.core.loaded.directory))
        assert accepted() == awake, level
