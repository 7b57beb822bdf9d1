"""What scripts for vLLM use around `LLM`: options, prompts, chats, pooling, beams, metrics, profiles."""

from __future__ import annotations

import array
import copy
import dataclasses
import functools
import importlib
import itertools
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch

from ostinato import BeamSearchParams, EngineArgs, PoolingParams, RequestError, SamplingParams
from ostinato.engine.config import EngineConfig
from ostinato.engine.llm import LLM
from ostinato.engine.peer_options.llm_rows import LLM_ROWS
from ostinato.engine.peer_options.option import Effect, PeerOption
from ostinato.engine.peer_options.typed_values import parsed
from ostinato.engine.vllm_api.argument_parser import FlexibleArgumentParser
from ostinato.engine.vllm_api.config_objects import CompilationConfig, CUDAGraphMode, PoolerConfig
from ostinato.engine.vllm_api.llm_options import LLMOptions, llm_options
from ostinato.engine.vllm_api.module_paths import PATHS, names_of
from ostinato.graphs import ConfigError

from .conftest import TinyModel
from .test_engine_greedy import assert_all_back
from .vllm_models import LONG, judged, judging_model, text_model

GREEDY = SamplingParams(temperature=0, max_tokens=6)
TALK = [{"role": "user", "content": "Hello"}]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    return text_model(tmp_path_factory.mktemp("text"))


@pytest.fixture(scope="module")
def llm(model: TinyModel) -> Iterator[LLM]:
    with LLM(model.directory, enforce_eager=True, max_model_len=128) as llm:
        yield llm


@pytest.fixture(autouse=True)
def nothing_left(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if "llm" in request.fixturenames:
        assert_all_back(request.getfixturevalue("llm"))


# -- module paths ------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", PATHS)
def test_a_path_of_vllm_shows_what_the_table_says(path: str) -> None:
    module = importlib.import_module(f"ostinato.{path}")
    assert set(names_of(path)) == set(module.__all__) <= {*dir(module)}
    for name, (home, ours) in names_of(path).items():
        assert getattr(module, name) is getattr(importlib.import_module(f"ostinato.{home}"), ours)
    with pytest.raises(AttributeError, match=f"module 'ostinato.{path}' has no attribute 'Nonsense'"):
        module.Nonsense  # noqa: B018


def test_a_path_that_nobody_has_is_an_import_error() -> None:
    with pytest.raises(ModuleNotFoundError, match=r"ostinato\.v1\.nonsense"):
        importlib.import_module("ostinato.v1.nonsense")


# -- options -----------------------------------------------------------------------------------------


def test_every_keyword_goes_through_the_table(tmp_path: Path) -> None:
    config, options = llm_options(
        "m",
        {
            "gpu_memory_utilization": 0.5,
            "max_num_seqs": 4,
            "max_num_batched_tokens": 64,
            "enforce_eager": False,
            "trust_remote_code": True,
            "tensor_parallel_size": 1,
            "hf_overrides": {"rope_theta": 5.0},
            "swap_space": 4,
            "tokenizer_mode": "auto",
            "runner": "pooling",
            "disable_log_stats": False,
            "compilation_config": CompilationConfig(cudagraph_mode=CUDAGraphMode.FULL_DECODE_ONLY),
            "structured_outputs_config": {"backend": "xgrammar"},
            "profiler_config": {"profiler": "torch", "torch_profiler_dir": str(tmp_path)},
            "pooler_config": PoolerConfig(pooling_type="MEAN"),
            "served_model_name": "tiny",
            "chat_template": "{{ messages }}",
            "host": None,
        },
    )
    assert (config.mem_fraction, config.max_running_requests, config.chunked_prefill_size) == (0.5, 4, 64)
    assert config.hf_overrides == {"rope_theta": 5.0}
    assert config.cuda_graph_mode == "FULL_DECODE_ONLY"
    assert (options.pooling, options.served_model_name) == ("mean", "tiny")
    assert (options.template, options.profile_dir) == ("{{ messages }}", str(tmp_path))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"enable_prompt_embeds": True}, "enable_prompt_embeds is not supported: prompts are texts"),
        ({"profiler_config": {"profiler": "cuda"}}, "profiler_config: profiler='cuda' is not supported"),
        ({"pooler_config": {"pooling_type": "CLS"}}, "pooler_config: pooling_type='CLS' is not supported"),
        ({"structured_outputs_config": {"backend": "guidance"}}, "structured_outputs_config: backend='guid"),
        ({"stream_interval": 4}, "stream_interval can only be 1, not 4"),
        ({"host": "0.0.0.0"}, "host is an option of the server"),
        ({"gpu_memory_utilisation": 0.5}, "unknown option 'gpu_memory_utilisation'"),
        ({"chat_template": "no/such/file"}, "chat_template: there is no chat template"),
        ({"hf_overrides": lambda config: config}, "not a function"),
    ],
)
def test_what_cannot_be_had_is_refused_by_name(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        _ = llm_options(None, given)[1].template


def test_batch_invariance_is_asked_for_as_with_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    assert llm_options(None, {})[0].batch_invariant
    assert not llm_options(None, {"batch_invariant": False})[0].batch_invariant


def test_engine_args_are_a_dataclass_whose_defaults_ask_for_nothing() -> None:
    args = EngineArgs(model="m", max_num_seqs=3)
    assert (args.model, args.load_format, args.tensor_parallel_size, args.max_num_seqs) == ("m", "auto", 1, 3)
    config = args.create_engine_config()
    assert config == llm_options("m", {"max_num_seqs": 3})[0]
    again = EngineArgs(**{**dataclasses.asdict(args), "gpu_memory_utilization": 0.3})
    assert again.create_engine_config().mem_fraction == 0.3
    with pytest.raises(TypeError, match="no_such_thing"):
        EngineArgs(no_such_thing=1)
    with pytest.raises(ConfigError, match="quantization is not supported"):
        EngineArgs(quantization="fp8").create_engine_config()


def test_the_flags_of_engine_args() -> None:
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    words = [
        "--model",
        "m",
        "--max_model_len",
        "4k",
        "-tp",
        "1",
        "--enforce-eager",
        "--no-enable-prefix-caching",
    ]
    words += ["-cc.cudagraph_mode=NONE", "--compilation_config.level", "3", "--hf-overrides", '{"a": 1}']
    words += ["--cudagraph-capture-sizes", "1", "2,4", "--gpu-memory-utilization=0.4"]
    args = EngineArgs.from_cli_args(parser.parse_args(words))
    assert (args.model, args.max_model_len, args.enforce_eager) == ("m", 4000, True)
    assert args.enable_prefix_caching is False
    assert args.cudagraph_capture_sizes == [1, 2, 4]
    config = args.create_engine_config()
    assert (config.cuda_graph_mode, config.mem_fraction) == ("NONE", 0.4)
    assert config.hf_overrides == {"a": 1}


def test_a_wrong_flag_is_a_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    for words, message in (
        (["--max-model-len", "long"], "'long' is not a whole number"),
        (["--compilation-config.level"], "expected one argument"),
        (["--no-such-flag"], "unrecognized arguments: --no-such-flag"),
    ):
        with pytest.raises(SystemExit):
            parser.parse_args(words)
        assert message in capsys.readouterr().err


def test_overrides_are_what_config_json_would_say(
    model: TinyModel, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The same weights with another base of rotations, and with a window."""
    fields = {**LONG, "rope_parameters": {"rope_type": "default", "rope_theta": 50.0}}
    changed = TinyModel(tmp_path, "Llama", **fields)
    overrides = {"rope_parameters": fields["rope_parameters"], "nonsense": 1}
    with LLM(model.directory, enforce_eager=True, hf_overrides=overrides) as llm:
        prompt = tuple(range(20, 60))
        [output] = llm.generate([list(prompt)], GREEDY)
        assert output.outputs[0].token_ids == changed.greedy(prompt, 6) != model.greedy(prompt, 6)
        assert llm.model_config.hf_config.rope_parameters["rope_theta"] == 50.0
    assert "hf_overrides: nonsense has no effect" in caplog.text
    assert "rope_parameters" not in caplog.text
    with pytest.raises(ValueError, match="hidden_size"):
        LLM(model.directory, hf_overrides={"hidden_size": -1})


@pytest.mark.parametrize("row", LLM_ROWS, ids=lambda row: row.name)
def test_a_row_of_llms_own_is_true(row: PeerOption, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "template").write_text("{{ messages }}")
    example = row.example.replace("{template}", str(tmp_path / "template"))
    value = True if row.kind == "flag" else parsed(row, row.name, [example])
    if row.effect is Effect.REFUSED:
        with pytest.raises(ConfigError, match=f"{row.name} is not supported: .{{8,}}"):
            llm_options(None, {row.name: value})
        return
    config, options = llm_options(None, {row.name: value})
    assert config == EngineConfig()
    changed = [name for name, now in vars(options).items() if now != getattr(LLMOptions(), name)]
    expected = {Effect.ACTS: [row.name], Effect.MAPPED: [row.becomes] if row.becomes else []}
    assert changed == expected.get(row.effect, [])
    assert bool(caplog.records) == (row.effect is Effect.HARMLESS and value not in row.same)


# -- prompts -----------------------------------------------------------------------------------------


def test_token_ids_are_a_prompt_and_a_list_of_them_are_many(llm: LLM, model: TinyModel) -> None:
    expected = model.greedy((5, 6, 7), 6)
    ids: list[Any] = [[5, 6, 7], (5, 6, 7), range(5, 8), np.array([5, 6, 7]), torch.tensor([5, 6, 7])]
    ids.append(array.array("i", [5, 6, 7]))
    tables = [np.array([[5, 6, 7]]), torch.tensor([[5, 6, 7]])]
    for given in [*ids, *([each] for each in ids), *tables, {"prompt_token_ids": [5, 6, 7]}]:
        [output] = llm.generate(given, GREEDY)
        assert output.outputs[0].token_ids == expected
        assert output.prompt_token_ids == [5, 6, 7]
    mixed = llm.generate([[5, 6, 7], {"prompt": "Hi"}, "Hi"], GREEDY)
    assert [output.prompt for output in mixed] == [None, "Hi", "Hi"]
    column = llm.generate(np.array(["Hi", "Ho"], dtype=object), GREEDY)
    assert [output.prompt for output in column] == ["Hi", "Ho"]
    assert llm.generate([], GREEDY) == []
    assert llm.generate({"prompt": "Hi", "multi_modal_data": None, "x": {}}, GREEDY)[0].finished


@pytest.mark.parametrize(
    ("prompts", "params", "message"),
    [
        (5, GREEDY, "a prompt must be a string .*, or a list of such prompts, not int 5"),
        (None, GREEDY, "not NoneType"),
        (b"bytes", GREEDY, "not bytes"),
        (torch.tensor(5), GREEDY, "not Tensor"),
        (torch.tensor([1.5]), GREEDY, "must be a list of integers"),
        ({"prompt_token_ids": []}, GREEDY, "the prompt is empty"),
        ({"text": "x"}, GREEDY, "a mapping with 'text' in it"),
        (
            {"prompt": "x", "multi_modal_data": {"image": 1}},
            GREEDY,
            "a prompt with 'multi_modal_data' cannot",
        ),
        (
            {"prompt_token_ids": [1], "prompt_embeds": object()},
            GREEDY,
            "a prompt with 'prompt_embeds' cannot",
        ),
        (["a", "b"], [GREEDY], "1 sampling parameters were given for 2 prompts"),
        (["a"], ["greedy"], "must be SamplingParams, not str"),
        ("a", {"temperature": 0}, "must be SamplingParams, not dict"),
    ],
)
def test_what_is_wrong_is_said_before_anything_is_queued(
    llm: LLM, prompts: Any, params: Any, message: str
) -> None:
    with pytest.raises(RequestError, match=message):
        llm.generate(prompts, params)
    assert not llm.engine.has_work


def test_a_stream_of_several_completions_is_refused(llm: LLM) -> None:
    with pytest.raises(RequestError, match=r"stream\(\) yields one completion: n must be 1, not 2"):
        next(llm.stream("Once", SamplingParams(n=2)))


def test_a_failed_prompt_of_a_list_is_logged(llm: LLM, caplog: pytest.LogCaptureFixture) -> None:
    [empty] = llm.generate([[]], GREEDY)
    assert "the prompt is empty" in (empty.error or "")
    caplog.clear()
    outputs = llm.generate(["good", "x" * 500, "fine"], GREEDY)
    assert [output.error is None for output in outputs] == [True, False, True]
    [record] = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert "prompt 1 of 3 failed" in record.message
    assert "max_model_len" in record.message


@pytest.mark.parametrize(
    ("keyword", "value"),
    [("mm_processor_kwargs", {"fps": 1}), ("priority", [1]), ("tokenization_kwargs", {"truncation": True})],
)
def test_keywords_of_vllm_that_do_nothing_here_are_refused(llm: LLM, keyword: str, value: Any) -> None:
    with pytest.raises(RequestError, match=f"{keyword} is not supported"):
        llm.generate("a", GREEDY, **{keyword: value})
    with pytest.raises(TypeError, match="use_tdqm"):
        llm.generate("a", GREEDY, use_tdqm=True)  # type: ignore[call-arg]
    [output] = llm.generate("a", GREEDY, priority=[0], lora_request=None)
    assert output.finished


def test_a_bar_of_ones_own(llm: LLM) -> None:
    made: list[Any] = []

    class Bar:
        def __init__(self, total: int, desc: str) -> None:
            self.total, self.done, self.is_closed = total, 0, False
            made.append(self)

        def update(self, count: int) -> None:
            self.done += count

        def close(self) -> None:
            self.is_closed = True

    llm.generate(["a", "b"], GREEDY, use_tqdm=Bar)
    llm.embed(["a", "b", "c"], use_tqdm=functools.partial(Bar, desc="embedding"))
    assert [(bar.total, bar.done, bar.is_closed) for bar in made] == [(2, 2, True), (3, 3, True)]


# -- conversations -----------------------------------------------------------------------------------


def test_options_of_chat_act(llm: LLM) -> None:
    def prompt(messages: Any = TALK, **options: Any) -> str | None:
        [output] = llm.chat(messages, GREEDY, **options)
        return output.prompt

    assert prompt() == "<|turn|>u:Hello<|turn|>a:"
    assert prompt(add_generation_prompt=False) == "<|turn|>u:Hello"
    begun = [*TALK, {"role": "assistant", "content": "Well, "}]
    going_on = {"add_generation_prompt": False, "continue_final_message": True}
    assert prompt(begun, **going_on) == "<|turn|>u:Hello<|turn|>a:Well, "
    shouting = "{{ messages[0].content | upper }}{{ mood }}"
    assert prompt(chat_template=shouting, chat_template_kwargs={"mood": "!"}) == "HELLO!"
    parts = [{"role": "user", "content": [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]}]
    assert prompt(parts) == "<|turn|>u:Hel\nlo<|turn|>a:"
    whole = "{{ messages[0].content[1].text }}"
    assert prompt(parts, chat_template=whole, chat_template_content_format="openai") == "lo"


CALLS = "{% for m in messages %}{{ m.role }}={{ m.content }}{% for call in m.tool_calls or [] %}" + (
    "{{ call.function.name }}{{ call.function.arguments | tojson }}{% endfor %};{% endfor %}"
)


@pytest.mark.parametrize(
    ("arguments", "written"),
    [
        ('{"city": "Rom"}', '{"city": "Rom"}'),
        ({"city": "Rom"}, '{"city": "Rom"}'),
        (" ", "{}"),
        (None, "{}"),
        ("[1]", "[1]"),
    ],
)
def test_calls_of_earlier_answers_are_written_as_their_arguments_are(
    llm: LLM, arguments: Any, written: str
) -> None:
    """The API has them as JSON texts, which a template would put in quotes, and no content as null."""
    call = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": arguments}}
    talk = [
        *TALK,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "5"},
    ]
    asked = copy.deepcopy(talk)
    [output] = llm.chat(asked, GREEDY, chat_template=CALLS)
    assert output.prompt == f"user=Hello;assistant=weather{written};tool=5;"
    assert asked == talk


def test_arguments_that_are_no_json_are_refused(llm: LLM) -> None:
    call = {"function": {"name": "weather", "arguments": "{"}}
    with pytest.raises(RequestError, match="arguments of a tool call are not JSON"):
        llm.chat([*TALK, {"role": "assistant", "tool_calls": [call]}], GREEDY, chat_template=CALLS)


def test_a_template_for_all_of_an_llms_chats(model: TinyModel) -> None:
    with LLM(model.directory, enforce_eager=True, chat_template="{{ messages[0].content }}?") as llm:
        assert llm.chat(TALK, GREEDY)[0].prompt == "Hello?"
        assert llm.chat(TALK, GREEDY, chat_template="{{ 'own' }}")[0].prompt == "own"


@pytest.mark.parametrize(
    ("messages", "options", "message"),
    [
        (TALK, {"chat_template_kwargs": {"messages": []}}, "must not contain messages"),
        (TALK, {"chat_template_content_format": "html"}, "must be one of auto, string, openai, not 'html'"),
        (TALK, {"continue_final_message": True}, "add_generation_prompt=False"),
        (
            TALK,
            {"tools": [{"function": {"name": "f"}}], "chat_template": "{{ messages }}"},
            "no place for to",
        ),
        (TALK, {"tools": "weather"}, "tools must be a list of objects"),
        (TALK, {"chat_template": "{% if %}"}, "chat template is broken"),
        ("Hello", {}, "messages must be a list of objects with role and content, not 'Hello'"),
        ([], {}, "messages is empty"),
        ([TALK, []], {}, r"messages\[1\] is empty"),
        ([{"content": "x"}], {}, "a message must be an object with role and content"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], {}, "a part of type 'image_url'"),
    ],
)
def test_chat_says_what_is_wrong(llm: LLM, messages: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        llm.chat(messages, GREEDY, **options)
    assert not llm.engine.has_work


def test_a_typo_is_a_type_error_and_an_unused_variable_a_warning(
    llm: LLM, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(TypeError, match="chat_templat"):
        llm.chat(TALK, GREEDY, chat_templat="x")  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="enable_thinking"):
        llm.chat(TALK, GREEDY, enable_thinking=False)  # type: ignore[call-arg]
    llm.chat(TALK, GREEDY, chat_template_kwargs={"enable_thinking": False})
    assert "the chat template does not use enable_thinking" in caplog.text


# -- the tokenizer -----------------------------------------------------------------------------------


def test_the_tokenizer_does_what_that_of_transformers_does(llm: LLM, model: TinyModel) -> None:
    from transformers import AutoTokenizer

    theirs, ours = AutoTokenizer.from_pretrained(model.directory), llm.get_tokenizer()
    text = "Hello <|turn|> you,\nall!"
    ids = theirs.encode(text)
    assert ours.encode(text) == ours(text).input_ids == ours(text)["input_ids"] == ids
    assert torch.equal(ours.encode(text, return_tensors="pt"), theirs.encode(text, return_tensors="pt"))
    assert ours([text, "a"]).input_ids == theirs([text, "a"]).input_ids
    for skips in (False, True):
        assert ours.decode(ids, skip_special_tokens=skips) == theirs.decode(ids, skip_special_tokens=skips)
    assert ours.batch_decode([ids, ids[:2]]) == theirs.batch_decode([ids, ids[:2]])
    names = ("eos_token", "eos_token_id", "bos_token", "bos_token_id", "pad_token", "pad_token_id")
    for name in (*names, "all_special_ids", "vocab_size", "chat_template"):
        assert getattr(ours, name) == getattr(theirs, name), name
    assert len(ours) == len(theirs)
    assert ours.get_vocab() == theirs.get_vocab()
    assert ours.convert_ids_to_tokens(ids) == theirs.convert_ids_to_tokens(ids)
    assert ours.convert_tokens_to_ids(["<|turn|>", "a"]) == theirs.convert_tokens_to_ids(["<|turn|>", "a"])
    assert ours.tokenize("Hi you") == theirs.tokenize("Hi you")
    for options in ({}, {"add_generation_prompt": True}, {"tools": [{"function": {"name": "f"}}]}):
        written = theirs.apply_chat_template(TALK, tokenize=False, **options)
        assert ours.apply_chat_template(TALK, tokenize=False, **options) == written
        assert ours.apply_chat_template(TALK, **options) == theirs.encode(written, add_special_tokens=False)
    begun = [*TALK, {"role": "assistant", "content": "Well"}]
    for tokenizer in (ours, theirs):
        written = tokenizer.apply_chat_template(begun, tokenize=False, continue_final_message=True)
        assert written == "<|turn|>u:Hello<|turn|>a:Well"
    with pytest.raises(AttributeError, match="pad_to_multiple_of"):
        _ = ours.pad_to_multiple_of


# -- vectors and heads -------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["Llama", "Mistral", "Qwen2", "Qwen3"])
def test_heads_judge_as_those_of_transformers(tmp_path: Path, family: str) -> None:
    reference = judging_model(tmp_path, family, 4)
    prompts = ["Hello", "a longer text than that one, which is two pages long"]
    with LLM(str(tmp_path), enforce_eager=True) as llm:
        for output in llm.classify(prompts):
            logits = judged(reference, output.prompt_token_ids)
            assert torch.allclose(torch.tensor(output.outputs.probs), logits.softmax(0), atol=1e-5)
        [raw] = llm.encode("Hello", PoolingParams(use_activation=False), pooling_task="classify")
        assert torch.allclose(raw.outputs.data, judged(reference, raw.prompt_token_ids), atol=1e-4)
        with pytest.raises(RequestError, match=r"score needs a model with one label.* has 4: use classify"):
            llm.score("a", "b")
        with pytest.raises(RequestError, match=f"{family}ForSequenceClassification has no output layer"):
            llm.generate("Hello", GREEDY)
        assert llm.embed("Hello")[0].outputs.hidden_size == 32


def test_a_model_without_a_head_says_so(llm: LLM) -> None:
    with pytest.raises(RequestError, match="LlamaForCausalLM has no classification head"):
        llm.classify("Hello")
    for task, message in (
        (None, "encode needs pooling_task: embed or classify"),
        ("token_embed", "'token_embed' is not supported: states of single tokens"),
        ("nonsense", "'nonsense' is not supported: use embed or classify"),
    ):
        with pytest.raises(RequestError, match=message):
            llm.encode("Hello", pooling_task=task)
    with pytest.raises(RequestError, match="'reward' is not supported: a model that scores whole texts"):
        llm.reward("Hello")
    with pytest.raises(RequestError, match="dimensions is 99, but this model's vectors have only 32"):
        llm.embed("Hello", pooling_params=PoolingParams(dimensions=99))
    with pytest.raises(RequestError, match="2 texts cannot be paired with 3"):
        llm.score(["a", "b"], ["a", "b", "c"])
    with pytest.raises(RequestError, match="score compares texts"):
        llm.score("a", [{"image": 1}])  # type: ignore[list-item]


def test_vectors_under_all_names(llm: LLM) -> None:
    [by_embed] = llm.embed("Hello")
    [by_encode] = llm.encode("Hello", pooling_task="embed")
    assert by_encode.outputs.data.tolist() == by_embed.outputs.embedding == by_embed.embedding
    [raw] = llm.embed("Hello", pooling_params=PoolingParams(normalize=False))
    length = torch.tensor(raw.outputs.embedding).norm()
    assert length != pytest.approx(1.0)
    assert (torch.tensor(raw.outputs.embedding) / length).tolist() == pytest.approx(
        by_embed.embedding, abs=1e-5
    )
    assert by_embed.finished
    assert by_embed.num_cached_tokens == 0


# -- beams -------------------------------------------------------------------------------------------


def straightforward_beams(
    model: TinyModel, prompt: list[int], width: int, tokens: int, eos: set[int], penalty: float
) -> list[tuple[list[int], float]]:
    """All continuations of all beams in every step, from a forward pass over everything."""
    beams, ended = [(prompt, 0.0)], []

    def score(beam: tuple[list[int], float]) -> float:
        ids, total = beam
        return float(total / (len(ids) - (ids[-1] in eos)) ** penalty)

    for _ in range(tokens):
        longer = []
        for ids, total in beams:
            logprobs = model.reference(torch.tensor([ids])).logits[0, -1].float().log_softmax(-1)
            values, found = logprobs.topk(2 * width)
            for value, token in zip(values.tolist(), found.tolist(), strict=True):
                (ended if token in eos else longer).append(([*ids, token], total + value))
        beams = sorted(longer, key=score, reverse=True)[:width]
    return sorted([*ended, *beams], key=score, reverse=True)[:width]


@pytest.mark.parametrize(("penalty", "eos"), [(1.0, 130), (0.0, 130), (2.0, None), (1.0, "often")])
def test_beams_are_those_of_a_straightforward_search(
    llm: LLM, model: TinyModel, penalty: float, eos: int | str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = [[7, 8, 9], list(range(20, 45))]
    # A token that is likely behind these prompts, so that beams end early.
    ends = model.greedy(tuple(prompts[0]), 2)[-1:] if eos == "often" else [130]
    loaded = dataclasses.replace(llm.engine.core.loaded, eos_token_ids=frozenset(ends))
    monkeypatch.setattr(llm.engine.core, "loaded", loaded)
    params = BeamSearchParams(beam_width=3, max_tokens=5, length_penalty=penalty, ignore_eos=eos is None)
    outputs = llm.beam_search([{"prompt_token_ids": prompt} for prompt in prompts], params)
    for prompt, output in zip(prompts, outputs, strict=True):
        expected = straightforward_beams(model, prompt, 3, 5, set() if eos is None else set(ends), penalty)
        assert [beam.tokens for beam in output.sequences] == [ids for ids, _ in expected]
        for beam, (_, total) in zip(output.sequences, expected, strict=True):
            assert beam.cum_logprob == pytest.approx(total, abs=1e-3)
            assert beam.text == llm.tokenizer.decode(beam.tokens)
            assert (beam.finish_reason == "stop") == (eos is not None and beam.tokens[-1] in ends)


def test_beams_that_meet_the_end_of_the_model_are_cut(llm: LLM) -> None:
    [output] = llm.beam_search([[5] * 125], BeamSearchParams(beam_width=2, max_tokens=10, ignore_eos=True))
    assert {len(beam.tokens) for beam in output.sequences} == {128}
    assert {beam.finish_reason for beam in output.sequences} == {"length"}


def test_a_search_is_not_cut_by_what_fails_in_its_middle(llm: LLM) -> None:
    """Beams that are shorter than they were wanted would pass for a result."""
    engine, steps = llm.engine, itertools.count()
    launch, step = engine.core._launch, engine.step
    params = BeamSearchParams(beam_width=2, max_tokens=6, ignore_eos=True)

    def fails(flight: Any) -> None:
        if next(steps) == 3:
            raise RuntimeError("no memory")
        launch(flight)

    def is_aborted() -> Any:
        if next(steps) == 3:
            for name in list(engine._served):
                engine.abort(name)
        return step()

    with patch.object(engine.core, "_launch", fails), pytest.raises(RequestError, match="no memory"):
        llm.beam_search([[7, 8, 9]], params)
    steps = itertools.count()
    with patch.object(engine, "step", is_aborted), pytest.raises(RequestError, match="was aborted"):
        llm.beam_search([[7, 8, 9]], params)
    [output] = llm.beam_search([[7, 8, 9]], params)
    assert {len(beam.tokens) for beam in output.sequences} == {9}


def test_a_search_that_cannot_be_is_refused(llm: LLM) -> None:
    for params, message in (
        (BeamSearchParams(beam_width=11, max_tokens=5), "at most 10 with max_logprobs=20"),
        (BeamSearchParams(2, 5, include_stop_str_in_output=True), "include_stop_str_in_output is not supp"),
        (GREEDY, "beam_search takes BeamSearchParams"),
    ):
        with pytest.raises(RequestError, match=message):
            llm.beam_search(["a"], params)  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="cannot fit"):
        llm.beam_search(["a" * 200], BeamSearchParams(2, 5))


# -- the rest ----------------------------------------------------------------------------------------


def test_times_of_a_request_are_in_order(llm: LLM) -> None:
    [output] = llm.generate("Hello", SamplingParams(temperature=0, max_tokens=5, logprobs=2))
    times = output.metrics
    assert times is not None
    assert 0 < times.queued_ts <= times.scheduled_ts <= times.first_token_ts <= times.last_token_ts
    assert times.first_token_latency == pytest.approx(times.first_token_ts - times.queued_ts)
    assert times.finished_time is not None
    assert times.arrival_time <= times.finished_time
    assert times.num_generation_tokens == 5
    chosen = zip(output.outputs[0].token_ids, output.outputs[0].logprobs or [], strict=True)
    assert output.outputs[0].cumulative_logprob == pytest.approx(sum(all_[t].logprob for t, all_ in chosen))
    [plain] = llm.generate("Hello", GREEDY)
    assert plain.outputs[0].cumulative_logprob is None


def test_queued_prompts_are_waited_for(llm: LLM, model: TinyModel) -> None:
    names = llm.enqueue([[5, 6, 7], "Hello"], GREEDY)
    assert len(set(names)) == 2
    llm.generate("in between", GREEDY)
    first, second = llm.wait_for_completion()
    assert first.outputs[0].token_ids == model.greedy((5, 6, 7), 6)
    assert [first.request_id, second.request_id] == names
    assert llm.wait_for_completion() == []
    with pytest.raises(RequestError, match="cannot fit"):
        llm.enqueue(["good", "x" * 500], GREEDY)
    assert not llm.engine.has_work


def test_a_reset_cache_finds_nothing(llm: LLM) -> None:
    prompt = "The same beginning of two pages or more, at least."
    llm.generate(prompt, GREEDY)
    assert llm.generate(prompt, GREEDY)[0].num_cached_tokens > 0
    assert llm.reset_prefix_cache()
    assert llm.generate(prompt, GREEDY)[0].num_cached_tokens == 0
    assert llm.reset_prefix_cache(reset_connector=True), "there is none to be reset"


def test_profiles_have_a_beginning_and_an_end(model: TinyModel, tmp_path: Path) -> None:
    options = {"torch_profiler_dir": str(tmp_path / "a"), "delay_iterations": 100}
    with LLM(model.directory, enforce_eager=True, profiler_config=options) as llm:
        with pytest.raises(RuntimeError, match="start one first"):
            llm.stop_profile()
        llm.start_profile("mine")
        with pytest.raises(RuntimeError, match="stop it first"):
            llm.start_profile()
        llm.generate("Hello", GREEDY)
        with pytest.raises(RuntimeError, match="the profile never began"):
            llm.stop_profile()
    # What is still recorded at the end of a process crashes it.
    with LLM(
        model.directory, enforce_eager=True, profiler_config={"torch_profiler_dir": str(tmp_path)}
    ) as llm:
        llm.start_profile("left")
        llm.generate("Hello", GREEDY)
    assert not torch.autograd._profiler_enabled()
    assert [file for file in tmp_path.glob("left*") if file.stat().st_size]


def test_the_engine_step_by_step_beside_other_calls(llm: LLM, model: TinyModel) -> None:
    engine = llm.llm_engine
    assert engine is llm.llm_engine
    assert engine.model_config.max_model_len == engine.vllm_config.scheduler_config.max_model_len == 128
    assert engine.model_config.get_vocab_size() == 131
    engine.add_request("mine", [5, 6, 7], GREEDY, arrival_time=1234.5)
    with pytest.raises(RequestError, match="lora_request must be a LoRARequest"):
        engine.add_request("adapted", "a", GREEDY, lora_request=object())  # type: ignore[arg-type]
    engine.add_request("vector", "Hello", PoolingParams())
    engine.add_request("gone", "Hello", GREEDY)
    engine.abort_request(["gone", "unknown"])
    assert engine.get_num_unfinished_requests() == 2
    llm.generate(["ends", "both"], SamplingParams(max_tokens=20, ignore_eos=True))
    told = {output.request_id: output for output in engine.step()}
    assert set(told) == {"mine", "vector"}
    assert told["mine"].metrics.arrival_time == 1234.5  # type: ignore[union-attr]
    assert told["mine"].outputs[0].token_ids == model.greedy((5, 6, 7), 6)  # type: ignore[index]
    assert told["vector"].outputs.data.tolist() == llm.embed("Hello")[0].embedding  # type: ignore[union-attr]
    assert not engine.has_unfinished_requests()
    assert engine.step() == []
    for params, message in (
        (PoolingParams(task="classify"), "no classification head"),
        (None, "params must"),
    ):
        with pytest.raises((RequestError, TypeError), match=message):
            engine.add_request("x", "a", params)  # type: ignore[arg-type]


def test_a_vector_that_fails_takes_no_other_output_along(llm: LLM) -> None:
    engine = llm.llm_engine
    engine.add_request("answer", [5, 6, 7], SamplingParams(temperature=0, max_tokens=1))
    for name in ("vector", "other"):
        engine.add_request(name, "Hello", PoolingParams())
    llm.engine.abort("vector")  # as a sleep or a pause does
    told = {output.request_id: output for output in engine.step()}
    assert told["answer"].finished
    assert told["vector"].error == "the request was aborted"  # type: ignore[union-attr]
    assert told["other"].outputs.data.tolist() == llm.embed("Hello")[0].embedding  # type: ignore[union-attr]
    assert not engine.has_unfinished_requests()


def test_names_that_callers_choose_are_not_given_to_others(llm: LLM) -> None:
    engine, taken = llm.llm_engine, int(llm.engine.new_id()) + 2
    engine.add_request(str(taken), [5, 6, 7], SamplingParams(max_tokens=20, ignore_eos=True))
    outputs = llm.generate([[1]] * 3, SamplingParams(max_tokens=1))
    assert [output.error for output in outputs] == [None] * 3
    engine.abort_request(str(taken))
