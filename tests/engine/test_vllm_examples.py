"""vLLM's offline examples: each test makes the calls of one, with our import and a tiny model's path.

docs/vllm-examples.md is the table of all of them. Engines start without graphs here where the example does
not say otherwise: capturing takes most of a start, and is tested elsewhere. Examples that ask for the same
engine share it.
"""

from __future__ import annotations

import asyncio
import io
import random
import re
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from ostinato import (
    LLM,
    AsyncEngineArgs,
    EngineArgs,
    LLMEngine,
    PoolingParams,
    RequestError,
    RequestOutput,
    SamplingParams,
)
from ostinato.engine.async_llm import AsyncLLM

from .conftest import TinyModel
from .vllm_models import judged, judging_model, text_model

PROMPTS = [
    "Hello, my name is",
    "The president of the United States is",
    "The capital of France is",
    "The future of AI is",
]
TALK = [
    {"role": "system", "content": "You are a helpful assistant"},
    {"role": "user", "content": "Hello"},
    {"role": "assistant", "content": "Hello! How can I assist you today?"},
    {"role": "user", "content": "Write an essay about the importance of higher education."},
]

MakeLLM = Callable[..., LLM]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    return text_model(tmp_path_factory.mktemp("text"))


@pytest.fixture(scope="module")
def make(model: TinyModel) -> Iterator[MakeLLM]:
    """`LLM(...)` as an example calls it, with the model's path in place of its name."""
    opened: dict[str, LLM] = {}

    def made(**options: Any) -> LLM:
        given = {"model": model.directory, "enforce_eager": True, **options}
        key = repr(sorted(given.items(), key=lambda each: each[0]))
        if key not in opened:
            opened[key] = LLM(**given)
        return opened[key]

    yield made
    for llm in opened.values():
        llm.close()


def parsed(*words: str, own: Callable[[Any], None] = lambda parser: None, **defaults: Any) -> Namespace:
    """The command line of an example: flags of the engine and of its own, defaults of its own."""
    from ostinato.utils.argparse_utils import FlexibleArgumentParser

    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    own(parser)
    parser.set_defaults(enforce_eager=True, **defaults)
    found: Namespace = parser.parse_args(list(words))
    return found


def sampling_flags(parser: Any) -> None:
    group = parser.add_argument_group("Sampling parameters")
    group.add_argument("--max-tokens", type=int)
    group.add_argument("--temperature", type=float)
    group.add_argument("--top-p", type=float)
    group.add_argument("--top-k", type=int)


def own_params(llm: LLM, args: dict[str, Any]) -> SamplingParams:
    params = llm.get_default_sampling_params()
    for name in ("max_tokens", "temperature", "top_p", "top_k"):
        if args[name] is not None:
            setattr(params, name, args[name])
    return params


def assert_completed(outputs: list[RequestOutput], prompts: list[str], tokens: int = 16) -> None:
    assert [output.prompt for output in outputs] == prompts
    for output in outputs:
        assert output.finished
        [completion] = output.outputs
        assert len(completion.token_ids) == tokens or completion.finish_reason == "stop"
        assert isinstance(completion.text, str)


def test_basic(model: TinyModel) -> None:
    """With graphs, as the example has it."""
    with LLM(model=model.directory, max_num_seqs=4) as llm:
        outputs = llm.generate(PROMPTS, SamplingParams(temperature=0.8, top_p=0.95))
        assert_completed(outputs, PROMPTS)
        assert llm.graph_report().replays


def test_generate(make: MakeLLM, model: TinyModel) -> None:
    args = vars(parsed("--max-tokens=5", "--temperature", "0", own=sampling_flags, model=model.directory))
    own = {name: args.pop(name) for name in ("max_tokens", "temperature", "top_p", "top_k")}
    llm = make(**args)
    params = own_params(llm, own)
    outputs = llm.generate(PROMPTS, params)
    assert_completed(outputs, PROMPTS, 5)
    for output in outputs:
        ids = output.prompt_token_ids
        assert output.outputs[0].token_ids == model.greedy(tuple(ids), 5)


def test_chat(make: MakeLLM, model: TinyModel, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    args = vars(parsed("--top_k", "3", own=sampling_flags, model=model.directory))
    own = {name: args.pop(name) for name in ("max_tokens", "temperature", "top_p", "top_k")}
    llm = make(**args)
    params = own_params(llm, own)
    assert params.top_k == 3
    [alone] = llm.chat(TALK, params, use_tqdm=False)
    assert alone.prompt is not None
    assert alone.prompt.endswith("higher education.<|turn|>a:")
    assert "prompts" not in capfd.readouterr().err
    outputs = llm.chat([TALK for _ in range(10)], params, use_tqdm=True)
    assert len(outputs) == 10
    assert "10/10" in capfd.readouterr().err
    other = "{% for m in messages %}{{ m['content'] }}\n{% endfor %}"
    outputs = llm.chat([TALK] * 2, params, use_tqdm=False, chat_template=other)
    assert [output.prompt for output in outputs] == ["\n".join(m["content"] for m in TALK) + "\n"] * 2


def test_classify(tmp_path: Path) -> None:
    reference = judging_model(tmp_path, "Qwen2", 3)
    args = parsed(model=str(tmp_path), runner="pooling")
    with LLM(**vars(args)) as llm:
        outputs = llm.classify(PROMPTS)
        for output in outputs:
            expected = judged(reference, output.prompt_token_ids).softmax(0)
            assert len(output.outputs.probs) == output.outputs.num_classes == 3
            assert torch.allclose(torch.tensor(output.outputs.probs), expected, atol=1e-5)


def test_embed(make: MakeLLM, model: TinyModel) -> None:
    from ostinato.utils.print_utils import print_embeddings

    llm = make(**vars(parsed(model=model.directory, runner="pooling")))
    outputs = llm.embed(PROMPTS)
    shown = io.StringIO()
    with redirect_stdout(shown):
        for output in outputs:
            print_embeddings(output.outputs.embedding)
    assert re.fullmatch(r"(Embeddings: \[(-?[\d.e-]+, ){4}\.\.\.\] \(size=32\)\n){4}", shown.getvalue())


def test_embed_matryoshka(make: MakeLLM, model: TinyModel) -> None:
    llm = make(**vars(parsed(model=model.directory, runner="pooling", trust_remote_code=True)))
    whole = llm.embed(PROMPTS)
    outputs = llm.embed(PROMPTS, pooling_params=PoolingParams(dimensions=8))
    for output, all_of_it in zip(outputs, whole, strict=True):
        beginning = torch.tensor(all_of_it.outputs.embedding[:8])
        assert output.outputs.hidden_size == 8
        assert torch.allclose(torch.tensor(output.outputs.embedding), beginning / beginning.norm(), atol=1e-5)


def test_score(tmp_path: Path, make: MakeLLM, model: TinyModel) -> None:
    query, documents = "What is the capital of France?", ["It is Brasilia.", "It is Paris."]
    reference = judging_model(tmp_path, "Qwen3", 1)
    with LLM(**vars(parsed(model=str(tmp_path), runner="pooling"))) as llm:
        outputs = llm.score(query, documents)
        for document, output in zip(documents, outputs, strict=True):
            ids = llm.get_tokenizer().encode(query, document)
            assert output.outputs.score == pytest.approx(judged(reference, ids).sigmoid().item(), abs=1e-5)
        with pytest.raises(RequestError, match="can't encode character"):
            llm.score(query, "\ud83d")
    # A model without such a head is asked for the nearness of vectors.
    llm = make()
    vectors = [torch.tensor(output.outputs.embedding) for output in llm.embed([query, *documents])]
    near = [output.outputs.score for output in llm.score(query, documents)]
    assert near == pytest.approx([float(vectors[0] @ other) for other in vectors[1:]], abs=1e-5)
    # Of vectors that are cut, as by `embed`.
    short = PoolingParams(dimensions=8)
    cut = [
        torch.tensor(one.outputs.embedding) for one in llm.embed([query, *documents], pooling_params=short)
    ]
    near = [output.outputs.score for output in llm.score(query, documents, pooling_params=short)]
    assert near == pytest.approx([float(cut[0] @ other) for other in cut[1:]], abs=1e-5)
    with pytest.raises(RequestError, match="dimensions is 99"):
        llm.score(query, documents, pooling_params=PoolingParams(dimensions=99))


def test_sequence_reward(tmp_path: Path) -> None:
    reference = judging_model(tmp_path, "Llama", 1, problem_type="regression")
    args = parsed(model=str(tmp_path), runner="pooling", max_model_len=1024, trust_remote_code=True)
    with LLM(**vars(args)) as llm:
        for output in llm.encode(PROMPTS, pooling_task="classify"):
            expected = judged(reference, output.prompt_token_ids)
            assert output.outputs.data.tolist() == pytest.approx(expected.tolist(), abs=1e-5)


def test_async_llm_streaming(model: TinyModel) -> None:
    from ostinato.engine.arg_utils import AsyncEngineArgs as FromTheirPath
    from ostinato.sampling_params import RequestOutputKind
    from ostinato.v1.engine.async_llm import AsyncLLM as AsyncFromTheirPath

    assert (FromTheirPath, AsyncFromTheirPath) == (AsyncEngineArgs, AsyncLLM)
    params = SamplingParams(
        max_tokens=20, temperature=0.8, top_p=0.95, seed=42, output_kind=RequestOutputKind.DELTA
    )

    async def streamed(engine: AsyncLLM, prompt: str, request_id: str) -> list[str]:
        pieces = []
        async for output in engine.generate(request_id=request_id, prompt=prompt, sampling_params=params):
            assert output.request_id == request_id
            pieces += [completion.text for completion in output.outputs]
            if output.finished:
                break
        return pieces

    async def main() -> list[list[str]]:
        engine = AsyncLLM.from_engine_args(AsyncEngineArgs(model=model.directory, enforce_eager=True))
        try:
            return [await streamed(engine, prompt, f"stream-{prompt}") for prompt in PROMPTS[:2]]
        finally:
            engine.shutdown()

    found = asyncio.run(main())
    with LLM(model=model.directory, enforce_eager=True) as llm:
        whole = params.clone()
        whole.output_kind = RequestOutputKind.CUMULATIVE
        for pieces, output in zip(found, llm.generate(PROMPTS[:2], whole), strict=True):
            assert len(pieces) > 2
            assert "".join(pieces) == output.outputs[0].text


TABLE = "| ID | Name | Age |\n" + "".join(f"| {n} | Name {n} | {20 + n} |\n" for n in range(30))


def test_automatic_prefix_caching(make: MakeLLM) -> None:
    llm = make(enable_prefix_caching=True)
    params = SamplingParams(temperature=0, max_tokens=10)
    llm.reset_prefix_cache()
    [first] = llm.generate(TABLE + "Question: what is the age of Name 3?", sampling_params=params)
    [second] = llm.generate(TABLE + "Question: what is the age of Name 7?", sampling_params=params)
    assert first.num_cached_tokens == 0
    assert second.num_cached_tokens >= len(TABLE) // 16 * 16


def test_prefix_caching(model: TinyModel) -> None:
    from ostinato.distributed import cleanup_dist_env_and_memory

    prompts = ["You are an expert school principal. " * 4 + prompt for prompt in PROMPTS]
    params = SamplingParams(temperature=0.0)
    options = {"model": model.directory, "gpu_memory_utilization": 0.4, "enforce_eager": True}
    regular = LLM(**options)
    without = [output.outputs[0].text for output in regular.generate(prompts, params)]
    del regular
    cleanup_dist_env_and_memory()
    cached = LLM(**options, enable_prefix_caching=True)
    cached.generate(prompts[0], params)
    outputs = cached.generate(prompts, params)
    assert [output.outputs[0].text for output in outputs] == without
    assert all(output.num_cached_tokens for output in outputs)
    cached.close()


def test_chat_with_tools(make: MakeLLM) -> None:
    llm = make(tokenizer_mode="mistral", config_format="mistral", load_format="mistral")
    tools = [
        {
            "type": "function",
            "function": {"name": "get_current_weather", "parameters": {"type": "object", "properties": {}}},
        }
    ]
    messages = [{"role": "user", "content": "Can you tell me what the temperate will be in Dallas?"}]
    params = SamplingParams(max_tokens=20, temperature=0.0)
    [first] = llm.chat(messages, sampling_params=params, tools=tools)
    assert first.prompt is not None
    assert first.prompt.startswith("[get_current_weather]<|turn|>u:Can you")
    messages.append({"role": "assistant", "content": first.outputs[0].text.strip()})
    messages.append({"role": "tool", "content": "85 degrees", "tool_call_id": "abc123xyz"})  # type: ignore[dict-item]
    [second] = llm.chat(messages, params, tools=tools)
    assert second.prompt is not None
    assert second.prompt.endswith("<|turn|>t:85 degrees<|turn|>a:")


def driven(engine: LLMEngine, requests: list[tuple[str, SamplingParams]], reset_at: int | None) -> list[Any]:
    finished: dict[str, RequestOutput] = {}
    number, step = 0, 0
    while requests or engine.has_unfinished_requests():
        if requests:
            prompt, params = requests.pop(0)
            engine.add_request(str(number), prompt, params)
            number += 1
        if step == reset_at:
            engine.reset_prefix_cache(reset_running_requests=True)
        for output in engine.step():
            assert isinstance(output, RequestOutput)
            if output.finished:
                assert repr(output)
                finished[output.request_id] = output
        step += 1
    return [finished[str(index)] for index in range(number)]


def test_llm_engine_example(model: TinyModel) -> None:
    engine = LLMEngine.from_engine_args(EngineArgs.from_cli_args(parsed(model=model.directory)))
    first, second, third = driven(
        engine,
        [
            ("A robot may not", SamplingParams(temperature=0.0, logprobs=1, prompt_logprobs=1)),
            ("To be or not to be,", SamplingParams(temperature=0.8, top_k=5, presence_penalty=0.2)),
            ("What is?", SamplingParams(n=2, temperature=0.8, top_p=0.95, frequency_penalty=0.1)),
        ],
        None,
    )
    assert first.outputs[0].token_ids == model.greedy(tuple(first.prompt_token_ids), 16)
    assert len(first.prompt_logprobs) == len("A robot may not")
    assert first.outputs[0].cumulative_logprob < 0
    assert len(second.outputs) == 1
    assert [completion.index for completion in third.outputs] == [0, 1]
    assert engine.get_num_unfinished_requests() == 0
    engine.close()


def test_reset_kv(model: TinyModel) -> None:
    def requests() -> list[tuple[str, SamplingParams]]:
        robot = SamplingParams(temperature=0.0, logprobs=1, prompt_logprobs=1, max_tokens=16)
        return [
            ("A robot may not injure a human being " * 5, robot),
            ("A robot may not injure a human being " * 5, robot.clone()),
            (
                "To be or",
                SamplingParams(temperature=0.8, top_k=5, presence_penalty=0.2, max_tokens=24, seed=1),
            ),
            ("What is?", SamplingParams(n=2, temperature=0.8, top_p=0.95, max_tokens=24, seed=2)),
        ]

    args = EngineArgs(model=model.directory, enforce_eager=True)
    texts, preempted = [], []
    for reset_at in (None, 10):
        engine = LLMEngine.from_engine_args(args)
        outputs = driven(engine, requests(), reset_at)
        texts.append([[each.token_ids for each in output.outputs] for output in outputs])
        found = {metric.name: metric for metric in engine.get_metrics()}
        preempted.append(found["vllm:num_preemptions"].value)
        engine.close()
    assert texts[0] == texts[1], "computed again, they go on as they were"
    assert preempted[0] == 0 < preempted[1]


def test_metrics(make: MakeLLM) -> None:
    from ostinato.v1.metrics.reader import Counter, Gauge, Histogram, Vector

    llm = make(disable_log_stats=False)
    before = {metric.name: metric for metric in llm.get_metrics()}
    outputs = llm.generate(PROMPTS, SamplingParams(temperature=0.8, top_p=0.95))
    after: dict[str, Any] = {metric.name: metric for metric in llm.get_metrics()}
    assert all(isinstance(metric, Counter | Gauge | Histogram | Vector) for metric in after.values())
    generated = sum(len(output.outputs[0].token_ids) for output in outputs)
    grown = after["vllm:generation_tokens"].value - before["vllm:generation_tokens"].value  # type: ignore[attr-defined]
    assert grown == generated
    waits = after["vllm:time_to_first_token_seconds"]
    assert waits.buckets["+Inf"] == waits.count >= len(PROMPTS)
    assert waits.sum > 0
    assert after["vllm:num_requests_running"].value == 0.0


def test_simple_profiling(make: MakeLLM, tmp_path: Path) -> None:
    folder = tmp_path / "vllm_profile"
    options = {"profiler": "torch", "torch_profiler_dir": str(folder)}
    llm = make(tensor_parallel_size=1, profiler_config=options)
    llm.start_profile()
    outputs = llm.generate(PROMPTS, SamplingParams(temperature=0.8, top_p=0.95))
    llm.stop_profile()
    assert_completed(outputs, PROMPTS)
    [trace] = folder.iterdir()
    assert trace.stat().st_size > 1000


def test_run_one_batch(model: TinyModel, tmp_path: Path) -> None:
    from ostinato.config import ProfilerConfig

    def batch_flags(parser: Any) -> None:
        parser.add_argument("--batch-size", type=int, default=1)
        parser.add_argument("--profile", choices=["none", "prefill", "decode", "both"], default="none")
        parser.add_argument("--profile-dir", type=str, default="")

    words = ("--batch-size=2", "--profile=decode", "--profile-dir", str(tmp_path))
    args = vars(parsed(*words, own=batch_flags, model=model.directory))
    batch, profile, folder = (args.pop(name) for name in ("batch_size", "profile", "profile_dir"))
    assert profile == "decode"
    args["profiler_config"] = ProfilerConfig(
        profiler="torch", torch_profiler_dir=folder, delay_iterations=1, max_iterations=4
    )
    with LLM(**args) as llm:
        params = llm.get_default_sampling_params()
        params.max_tokens = params.min_tokens = 8
        params.ignore_eos = True
        llm.start_profile()
        outputs = llm.generate(["Hello, my na"] * batch, params)
        llm.stop_profile()
    assert [len(output.outputs[0].token_ids) for output in outputs] == [8, 8]
    assert len(list(tmp_path.iterdir())) == 1


def test_structured_outputs(make: MakeLLM) -> None:
    from ostinato.sampling_params import StructuredOutputsParams
    from pydantic import BaseModel

    class Car(BaseModel):
        brand: int
        fast: bool

    sql = 'root ::= "SELECT " column " from table_1 "\ncolumn ::= "col_1" | "col_2"\n'
    llm = make(max_model_len=200)

    def answer(params: SamplingParams) -> str:
        return str(llm.generate("Classify: vLLM is wonderful!", sampling_params=params)[0].outputs[0].text)

    choice = StructuredOutputsParams(choice=["Positive", "Negative"])
    assert answer(SamplingParams(structured_outputs=choice)) in ("Positive", "Negative")
    shape = StructuredOutputsParams(regex=r"[a-z]{1,5}@[a-z]{1,5}\.com\n")
    found = answer(SamplingParams(structured_outputs=shape, stop=["\n"], max_tokens=50))
    assert re.fullmatch(r"[a-z]{1,5}@[a-z]{1,5}\.com", found)
    schema = {**Car.model_json_schema(), "additionalProperties": False}
    shape = StructuredOutputsParams(json=schema)
    text = answer(SamplingParams(structured_outputs=shape, max_tokens=100, temperature=0.5, seed=3))
    assert text.startswith("{")
    shape = StructuredOutputsParams(grammar=sql)
    assert answer(SamplingParams(structured_outputs=shape, max_tokens=50)) in (
        "SELECT col_1 from table_1 ",
        "SELECT col_2 from table_1 ",
    )


def test_reproducibility(model: TinyModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    params = SamplingParams(temperature=0.8, top_p=0.95)
    found = []
    for _ in range(2):
        with LLM(model=model.directory, enforce_eager=True) as llm:
            found.append([output.outputs[0].text for output in llm.generate(PROMPTS, params)])
        random.random()  # the script's own numbers have nothing to do with it
    assert found[0] == found[1]


def test_pause_resume(model: TinyModel) -> None:
    times: list[float] = []

    async def main() -> RequestOutput:
        engine = AsyncLLM.from_engine_args(AsyncEngineArgs(model=model.directory, enforce_eager=True))
        params = SamplingParams(max_tokens=30, ignore_eos=True)

        async def generating() -> RequestOutput:
            outputs = []
            async for output in engine.generate(
                request_id="test-req", prompt="Once upon a time", sampling_params=params
            ):
                outputs.append(output)
                times.append(time.monotonic())
            return outputs[-1]

        async def controlling() -> None:
            while len(times) < 5:
                await asyncio.sleep(0.001)
            await engine.pause_generation(mode="keep")
            assert await engine.is_paused()
            count = len(times)
            await asyncio.sleep(0.3)
            assert len(times) <= count + 1, "what was on its way arrives, and nothing else"
            await engine.resume_generation()

        output, _ = await asyncio.gather(generating(), controlling())
        engine.shutdown()
        return output

    output = asyncio.run(main())
    assert output.finished
    assert len(output.outputs[0].token_ids) == 30
    assert max(after - before for before, after in pairwise(times)) >= 0.27


def test_context_extension(make: MakeLLM, caplog: pytest.LogCaptureFixture) -> None:
    factor, original = 4.0, 1024
    overrides = {
        "rope_parameters": {
            "rope_theta": 1000000,
            "rope_type": "yarn",
            "factor": factor,
            "original_max_position_embeddings": original,
        },
        "max_model_len": int(original * factor),
    }
    llm = make(hf_overrides=overrides)
    assert llm.engine.core.loaded.model.config.max_position_embeddings == 4096
    assert "hf_overrides: max_model_len has no effect" in caplog.text
    params = SamplingParams(temperature=0.8, top_p=0.95, max_tokens=12)
    [output] = llm.chat(TALK[:3], params, use_tqdm=False)
    assert len(output.outputs[0].token_ids) <= 12


def test_the_table_names_these_tests() -> None:
    """docs/vllm-examples.md has a row for each test, and each row that names a test names one of these."""
    page = (Path(__file__).parents[2] / "docs" / "vllm-examples.md").read_text()
    named = set(re.findall(r"`(test_\w+)`", page))
    here = {name for name in globals() if name.startswith("test_")} - {"test_the_table_names_these_tests"}
    assert named == here
    assert len(here) >= 14
