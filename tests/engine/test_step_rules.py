"""Which steps the scheduler makes, against rules written down a second time."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from ostinato.engine.parameters.sampling_params import SamplingParams

from .expected_steps import Step, expected_steps
from .test_scheduler import Engine


@settings(max_examples=80, deadline=None)
@given(data=st.data())
def test_the_steps_are_those_of_the_rules(data: st.DataObject) -> None:
    """Requests of all lengths at once, on many pages or few: step by step as the rules say."""
    length, running = 64, data.draw(st.integers(1, 6), label="running")
    chunked = data.draw(st.booleans(), label="chunked")
    budget = data.draw(st.integers(max(running, 4), 40), label="budget") if chunked else 70
    # With up to 16 free pages per request, decodes take one at a time, as the rules have it.
    pages = data.draw(st.integers(6, 17) | st.just(200), label="pages")
    # The rules do not say what a preemption makes of tokens under way.
    ahead = data.draw(st.integers(0, 2), label="ahead") if pages > 17 else 0
    jobs = data.draw(
        st.lists(st.tuples(st.integers(1, 50), st.integers(0, 14)), min_size=1, max_size=12), label="jobs"
    )
    engine = Engine(
        num_pages=pages,
        page_size=16,
        max_running=running,
        max_batched_tokens=budget,
        max_model_len=length,
        chunked_prefill=chunked,
        prefix_caching=False,
        lookahead=ahead,
    )
    for at, (prompt, output) in enumerate(jobs):
        if output:
            engine.add([at % 12] * prompt, SamplingParams(max_tokens=output, ignore_eos=True))
        else:
            engine.embed([at % 12] * prompt)
    found = []
    while engine.scheduler.has_work:
        step = engine.launch()
        if step is not None:
            found.append(
                Step(step.total_tokens, step.num_requests, step.is_uniform_decode, bool(step.samples.any()))
            )
        if engine.launched and (step is None or len(engine.launched) > ahead):
            engine.complete()
    prompts, outputs = zip(*jobs, strict=True)
    assert found == expected_steps(
        prompts,
        outputs,
        running=running,
        budget=budget,
        chunked=chunked,
        ahead=ahead,
        pages=pages,
    )
    assert engine.pages.num_free == engine.pages.num_usable
