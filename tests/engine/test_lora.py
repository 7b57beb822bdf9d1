"""Adapters in the engine: every answer is that of the model with its adapter merged into it."""

import asyncio
import json
import os
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from models.small_adapters import adapter_tensors, write_adapter
from ostinato import LLM, AsyncLLM, LoRARequest, RequestError, SamplingParams
from ostinato.engine.resolved_config import ResolvedConfig
from ostinato.engine.stepping.model_runner import ModelRunner
from ostinato.graphs import BatchDescriptor, ConfigError, VerifyError

from .conftest import TinyModel, prompts_of
from .lora_world import GREEDY, LoraWorld

SMALL = {
    "enable_lora": True,
    "max_lora_rank": 8,
    "max_loras": 2,
    "max_running_requests": 4,
    "num_pages": 40,
    "cuda_graph_bs": (4,),
    "cuda_graph_prefill_tokens": (16,),
    "chunked_prefill_size": 16,
}


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> LoraWorld:
    return LoraWorld.make(tmp_path_factory.mktemp("lora"))


@pytest.fixture(scope="module")
def engine(world: LoraWorld) -> Iterator[LLM]:
    with LLM(world.base.directory, max_cpu_loras=2, **SMALL) as llm:
        yield llm


@pytest.fixture
def llm(engine: LLM) -> Iterator[LLM]:
    """The shared engine, without adapters at the beginning and without a trace at the end."""
    yield engine
    core = engine.engine.core
    core.settle()  # a step ahead may be under way, for nobody
    assert not core.has_work
    core.scheduler.check_integrity()
    for lora_id in engine.list_loras():
        assert engine.remove_lora(lora_id)
    assert core.adapters is not None
    assert core.adapters.slots.tenants == [None, None]
    assert not core.adapters.slots.unwritten


def test_graphs_with_adapters_share_their_warm_ups(world: LoraWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph with adapters is one run of the step more, its recording: rungs are warmed up once for both."""
    if torch.cuda.is_available():
        pytest.skip("where kernels are compiled, steps run for that as well")
    runs: list[int] = []
    run = ModelRunner.step

    def counted(self: ModelRunner, *args: Any, descriptor: BatchDescriptor, **fields: Any) -> Any:
        runs.append(descriptor.lora)
        return run(self, *args, descriptor=descriptor, **fields)

    monkeypatch.setattr(ModelRunner, "step", counted)
    monkeypatch.setattr(ResolvedConfig, "warmups", 1)
    found = []
    for options in ({**SMALL, "enable_lora": False}, SMALL):
        runs.clear()
        with LLM(world.base.directory, **options) as llm:
            found.append((len(runs), len(llm.engine.core.runner.graphs.keys)))
    (plain_runs, plain_graphs), (all_runs, all_graphs) = found
    assert all_graphs == 2 * plain_graphs
    assert all_runs - plain_runs == all_graphs - plain_graphs


def lora_replays(llm: LLM) -> dict[bool, int]:
    """Replays of graphs with and without adapters."""
    counts = {True: 0, False: 0}
    for graph in llm.graph_report().graphs:
        counts["lora" in str(graph.descriptor)] += graph.replays
    return counts


@pytest.mark.parametrize(
    "mode",
    [
        *("none", "full", "full-and-piecewise"),
        *(pytest.param(mode, marks=pytest.mark.slow) for mode in ("piecewise", "full-decode-only")),
    ],
)
def test_mixed_batches_answer_as_the_merged_models(world: LoraWorld, mode: str) -> None:
    """Three adapters and none over two slots, prompts in chunks, too few pages for all, prefixes shared."""
    beginning = prompts_of([32], seed=1)[0]["prompt_token_ids"]
    prompts = [
        {"prompt_token_ids": [*beginning, *rest["prompt_token_ids"]]}
        for rest in prompts_of([3, 9, 14, 1, 20, 6, 11, 2])
    ]
    numbers: list[int | None] = [0, None, 1, 2, 0, 1, None, 2]
    with LLM(world.base.directory, cuda_graph_mode=mode, **{**SMALL, "num_pages": 12}) as llm:
        outputs = world.check(llm, prompts, numbers, 20)
        scheduler = llm.engine.core.scheduler
        assert scheduler.num_preemptions, "the pages were not scarce"
        assert any(output.num_cached_tokens for output in outputs)
        scheduler.check_integrity()
        replays, report = lora_replays(llm), llm.graph_report()
        if mode == "none":
            assert set(report.eager_steps) == {"disabled"}
        else:
            assert replays[True] > 10
            assert set(report.eager_steps) <= ({"mixed-batch"} if mode == "full-decode-only" else set())
    for number in (0, 1, 2):
        assert any(world.expected(number, p) != world.expected(None, p) for p in prompts), "changes nothing"


@pytest.mark.slow
def test_qwen3_with_an_adapter(tmp_path: Path) -> None:
    world = LoraWorld.make(tmp_path, "Qwen3", head_dim=16)
    with LLM(world.base.directory, **SMALL) as llm:
        world.check(llm, prompts_of([5, 12, 20, 7]), [1, None, 3, 1])


def test_without_adapters_in_a_batch_the_plain_graphs_run(world: LoraWorld, llm: LLM) -> None:
    before = lora_replays(llm)
    world.check(llm, prompts_of([5, 9]), [None, None])
    after = lora_replays(llm)
    assert after[True] == before[True]
    assert after[False] > before[False]
    keys = [str(graph.descriptor) for graph in llm.graph_report().graphs]
    assert sum("lora" in key for key in keys) * 2 == len(keys)


@pytest.mark.slow
def test_without_specialisation_all_steps_run_from_graphs_with_adapters(world: LoraWorld) -> None:
    with LLM(world.base.directory, compilation_config={"cudagraph_specialize_lora": False}, **SMALL) as llm:
        world.check(llm, prompts_of([5, 9, 4]), [None, 1, None])
        world.check(llm, prompts_of([5, 9]), [None, None])
        assert lora_replays(llm)[False] == 0
        assert all("lora" in str(graph.descriptor) for graph in llm.graph_report().graphs)


def test_requests_without_an_adapter_have_the_bits_of_an_engine_without(world: LoraWorld, llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=6, logprobs=5)
    prompts = prompts_of([7, 18, 5, 11], seed=9)
    plain = {name: value for name, value in SMALL.items() if "lora" not in name}
    with LLM(world.base.directory, **plain) as other:
        expected = [output.outputs[0].logprobs for output in other.generate(prompts, params)]
    llm.reset_prefix_cache()
    alone = llm.generate(prompts, params)
    assert [output.outputs[0].logprobs for output in alone] == expected
    llm.reset_prefix_cache()
    beside = llm.generate(prompts, params, lora_request=[None, world.asked(1), None, world.asked(3)])
    for at in (0, 2):
        assert beside[at].outputs[0].logprobs == expected[at]
    assert beside[1].outputs[0].logprobs != expected[1]
    assert [output.lora_request for output in beside] == [None, world.asked(1), None, world.asked(3)]


def test_more_adapters_than_slots_and_than_places_on_the_host(world: LoraWorld, llm: LLM) -> None:
    for seed in (1, 2):
        prompts = prompts_of([4, 9, 6, 11, 5, 8, 3], seed=seed)
        world.check(llm, prompts, [0, 1, 2, 3, 4, None, 0])
    adapters = llm.engine.adapters
    assert llm.list_loras() == {1, 2, 3, 4, 5}
    on_host = [known for known in adapters._known.values() if known.version.adapter is not None]
    world.check(llm, prompts_of([4]), [4])
    assert len(on_host) >= 2
    assert sum(known.version.adapter is not None for known in adapters._known.values()) == 2


def test_a_pinned_adapter_keeps_its_slot(world: LoraWorld, llm: LLM) -> None:
    assert llm.add_lora(world.asked(0))  # type: ignore[arg-type]
    assert not llm.add_lora(world.asked(0))  # type: ignore[arg-type]
    assert llm.pin_lora(1)
    world.check(llm, prompts_of([4, 5, 6, 7]), [0, 1, 2, 3])
    world.check(llm, prompts_of([4, 5]), [1, 2])
    pinned, *others = llm.engine.adapters.listed()
    assert (pinned.is_pinned, pinned.is_on_device) == (True, True)
    assert sum(each.is_on_device for each in others) == 1
    assert not llm.pin_lora(99)
    # The last slot cannot be pinned while somebody else needs it, and who finds none is refused.
    assert llm.pin_lora(2)
    with pytest.raises(RequestError, match="all 2 are reserved for pinned adapters"):
        llm.generate(prompts_of([4])[0], GREEDY, lora_request=world.asked(2))
    world.check(llm, prompts_of([4, 5, 6]), [0, 1, None])
    # Nor can more be pinned than there are slots: nothing is loaded then.
    with pytest.raises(RequestError, match="cannot be pinned: all 2 slots are reserved"):
        llm.pin_lora(3)
    with pytest.raises(RequestError, match="cannot be pinned"):
        llm.engine.adapters.load(LoRARequest("another", 77, world.path(4)), pinned=True)
    assert 77 not in llm.list_loras()
    assert llm.pin_lora(2)


def test_a_pinned_adapter_that_is_replaced_lets_its_requests_end(world: LoraWorld, llm: LLM) -> None:
    """All slots are kept for pinned ones by then."""
    llm.add_lora(world.asked(0))  # type: ignore[arg-type]
    llm.add_lora(world.asked(1))  # type: ignore[arg-type]
    llm.pin_lora(1)
    [prompt] = prompts_of([9])
    output = llm.engine.add(prompt, GREEDY, adapter=llm.engine.version_of(world.asked(0)))
    llm.add_lora(LoRARequest("adapter-0", 1, world.path(2), load_inplace=True))
    llm.pin_lora(2)
    for _ in range(100):
        llm.engine.step()
    assert output.outputs[0].token_ids == world.expected(0, prompt)
    assert {each.name for each in llm.engine.adapters.listed() if each.is_pinned} == {
        "adapter-0",
        "adapter-1",
    }


def test_a_replaced_adapter_serves_new_requests_and_old_ones_keep_theirs(
    world: LoraWorld, llm: LLM, tmp_path: Path
) -> None:
    place = tmp_path / "changing"
    shutil.copytree(world.path(0), place)
    [prompt] = prompts_of([35], seed=3)
    asked = LoRARequest("changing", 7, str(place))
    stepwise = llm.llm_engine
    stepwise.add_request("old", prompt, GREEDY, lora_request=asked)
    for _ in range(4):
        stepwise.step()
    shutil.rmtree(place)
    shutil.copytree(world.path(1), place)
    again = LoRARequest("changing", 7, str(place), load_inplace=True)
    stepwise.add_request("new", prompt, GREEDY, lora_request=again)
    stepwise.add_request("also new", prompt, GREEDY, lora_request=asked)
    found: dict[str, Any] = {}
    while stepwise.has_unfinished_requests():
        found |= {output.request_id: output for output in stepwise.step()}
    assert found["old"].outputs[0].token_ids == world.expected(0, prompt)
    for name in ("new", "also new"):
        assert found[name].outputs[0].token_ids == world.expected(1, prompt)
    assert world.expected(0, prompt) != world.expected(1, prompt)


def test_the_same_name_loaded_again_finds_no_old_pages(world: LoraWorld, llm: LLM) -> None:
    [prompt] = prompts_of([40], seed=4)

    def cached(asked: LoRARequest | None, number: int | None) -> int:
        [output] = llm.generate([prompt], GREEDY, lora_request=asked)
        assert output.outputs[0].token_ids == world.expected(number, prompt)
        assert output.num_cached_tokens is not None
        return output.num_cached_tokens

    llm.reset_prefix_cache()
    assert cached(None, None) == 0
    name = LoRARequest("x", 1, world.path(0))
    assert cached(name, 0) == 0
    assert cached(name, 0) == 32
    assert cached(LoRARequest("x", 1, world.path(0), load_inplace=True), 0) == 0
    assert cached(LoRARequest("x", 1, world.path(2), load_inplace=True), 2) == 0
    assert cached(LoRARequest("x", 1), 2) == 32
    assert llm.remove_lora(1)
    assert cached(LoRARequest("x", 1, world.path(3)), 3) == 0
    assert cached(None, None) == 32


def test_a_salt_of_a_client_is_no_adapter(world: LoraWorld, llm: LLM) -> None:
    [prompt] = prompts_of([40], seed=5)
    llm.generate([prompt], GREEDY, lora_request=world.asked(0))
    version = llm.engine.adapters._known["adapter-0"].version
    salted = {**prompt, "cache_salt": version.salt.decode(errors="surrogateescape")}
    [output] = llm.generate([salted], GREEDY)
    assert output.num_cached_tokens == 0
    assert output.outputs[0].token_ids == world.expected(None, prompt)


def test_an_adapter_that_changed_on_disk_is_not_read_behind_ones_back(
    world: LoraWorld, llm: LLM, tmp_path: Path
) -> None:
    place = tmp_path / "changing"
    shutil.copytree(world.path(0), place)
    asked = LoRARequest("changing", 9, str(place))
    llm.add_lora(asked)
    world.check(llm, prompts_of([4, 5]), [1, 2])
    world.check(llm, prompts_of([4, 5]), [3, 4])  # it had to make room on the host
    shutil.rmtree(place)
    shutil.copytree(world.path(1), place)
    with pytest.raises(RequestError, match=r"has changed in .* since it was loaded"):
        llm.generate(prompts_of([4])[0], GREEDY, lora_request=asked)
    [prompt] = prompts_of([4])
    [output] = llm.generate([prompt], GREEDY, lora_request=LoRARequest("changing", 9, str(place), True))
    assert output.outputs[0].token_ids == world.expected(1, prompt)


def test_an_adapter_in_use_is_not_removed(world: LoraWorld, llm: LLM) -> None:
    stepwise, [prompt] = llm.llm_engine, prompts_of([9])
    stepwise.add_request("running", prompt, GREEDY, lora_request=world.asked(0))
    stepwise.step()
    with pytest.raises(RequestError, match="'adapter-0' is in use by 1 unfinished request"):
        llm.remove_lora(1)
    stepwise.abort_request("running")
    assert llm.remove_lora(1)
    assert not llm.remove_lora(1)
    with pytest.raises(RequestError, match="'adapter-0' is not loaded"):
        llm.generate(prompt, GREEDY, lora_request=LoRARequest("adapter-0", 1))


def _edited(place: Path, world: LoraWorld, change: Any, **fields: Any) -> str:
    shutil.copytree(world.path(0), place)
    config = json.loads((place / "adapter_config.json").read_text()) | fields
    (place / "adapter_config.json").write_text(json.dumps(config))
    if change is not None:
        tensors = load_file(place / "adapter_model.safetensors")
        change(tensors)
        save_file(tensors, place / "adapter_model.safetensors")
    return str(place)


LAYER = "base_model.model.model.layers.0.self_attn.q_proj"
BROKEN: dict[str, tuple[Any, dict[str, Any], str]] = {
    "rank": (None, {"r": 9}, "rank 9, but the maximum is 8: raise max_lora_rank"),
    "rank of tensors": (None, {"r": 5}, r"matrix A of layer .* has shape \[4, 32\], not \[5, 32\]"),
    "dora": (None, {"use_dora": True}, "use_dora is not supported"),
    "bias": (None, {"bias": "all"}, "bias 'all' is not supported"),
    "modules_to_save": (None, {"modules_to_save": ["lm_head"]}, "modules_to_save is not supported"),
    "pissa": (None, {"init_lora_weights": "pissa"}, "'pissa' is not supported"),
    "start": (None, {"init_lora_weights": "newly_found"}, "'newly_found' is unknown"),
    "output layer": (
        None,
        {"target_modules": ["q_proj", "v_proj", "lm_head"]},
        "target_modules contain lm_head, which adapters cannot change; supported target modules are",
    ),
    "embeddings by a pattern": (
        None,
        {"target_modules": r".*\.(q_proj|v_proj|embed_tokens)"},
        "target_modules contain model.embed_tokens, which",
    ),
    "pattern of targets": (
        None,
        {"target_modules": "*_proj"},
        r"'\*_proj' is not a regular expression: noth",
    ),
    "pattern of ranks": (None, {"rank_pattern": {"(q": 4}}, r"'\(q' is not a regular expression: missing \)"),
    "switch": (None, {"use_rslora": "false"}, "a switch must be true or false, not 'false'"),
    "layers": (None, {"layers_to_transform": "01"}, "a layer must be a number, not '0'"),
    "not finite": (
        lambda t: t[f"{LAYER}.lora_A.weight"][3, 5].fill_(torch.nan),
        {},
        "matrix A of layer .*q_proj has values that are not finite in torch.float32",
    ),
    "too large once scaled": (
        lambda t: t[f"{LAYER}.lora_B.weight"].fill_(3e38),
        {"lora_alpha": 8},
        "matrix B of layer .* not finite",
    ),
    "layer of the model": (
        lambda t: t.update({"base_model.model.lm_head.base_layer.weight": torch.zeros(131, 32)}),
        {},
        "PEFT saves a layer of the model with adapters of embeddings and of the output layer",
    ),
    "kind": (None, {"peft_type": "IA3"}, "peft_type 'IA3' is not supported"),
    "unknown field": (None, {"new_feature": 3}, "new_feature is not supported"),
    "field": (None, {"r": "four"}, "a rank must be an integer"),
    "alpha": (None, {"lora_alpha": None}, "an alpha must be a number"),
    "no tensors": (lambda t: [t.pop(name) for name in list(t)], {}, "contains no matrices"),
    "half": (lambda t: t.pop(f"{LAYER}.lora_B.weight"), {}, "has no matrix B"),
    "layer": (
        lambda t: [t.pop(f"{LAYER}.lora_{which}.weight") for which in "AB"],
        {},
        "1 layers in its target_modules have no tensors",
    ),
    "more layers": (None, {"target_modules": ["v_proj"]}, "have tensors but are not in its target_modules"),
    "shape": (
        lambda t: t.update({f"{LAYER}.lora_A.weight": torch.zeros(4, 31)}),
        {},
        r"has shape \[4, 31\], not \[4, 32\]",
    ),
    "dtype": (
        lambda t: t.update({f"{LAYER}.lora_A.weight": torch.zeros(4, 32, dtype=torch.int8)}),
        {},
        "is torch.int8",
    ),
    "unknown target": (
        lambda t: t.update({"base_model.model.lm_head.lora_A.weight": torch.zeros(4, 32)}),
        {},
        "lm_head is not a layer of LlamaForCausalLM that an adapter can change; "
        "supported target modules are down_proj",
    ),
    "embeddings": (
        lambda t: t.update({"base_model.model.model.embed_tokens.lora_embedding_A": torch.zeros(4, 32)}),
        {},
        "adapters of embeddings are not supported",
    ),
    "a pattern that backtracks": (
        lambda t: None,
        {"rank_pattern": {"(.*)*x(.*)*y(.*)*z": 2}, "target_modules": "(.*)*x(.*)*y(.*)*z"},
        "are not in its target_modules",
    ),
    "a pattern that looks ahead": (lambda t: None, {"rank_pattern": {"(?=q)q_proj": 2}}, "not supported"),
    "magnitudes": (
        lambda t: t.update({f"{LAYER}.lora_magnitude_vector": torch.zeros(32)}),
        {},
        "DoRA is not supported",
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_adapter_is_refused_and_changes_nothing(
    world: LoraWorld, llm: LLM, tmp_path: Path, case: str
) -> None:
    change, fields, text = BROKEN[case]
    path = _edited(tmp_path / "broken", world, change, **fields)
    llm.add_lora(LoRARequest("good", 1, world.path(0)))
    with pytest.raises(RequestError, match=text):
        llm.add_lora(LoRARequest("broken", 2, path))
    with pytest.raises(RequestError, match=text):
        llm.add_lora(LoRARequest("good", 1, path, load_inplace=True))
    assert llm.list_loras() == {1}
    if case == "shape":
        [prompt] = prompts_of([6])
        refused, served = llm.generate(
            [prompt, prompt], GREEDY, lora_request=[LoRARequest("broken", 2, path), LoRARequest("good", 1)]
        )
        assert refused.error is not None
        assert served.outputs[0].token_ids == world.expected(0, prompt)


def test_files_that_are_missing_or_no_files(world: LoraWorld, llm: LLM, tmp_path: Path) -> None:
    def refused(path: Path, text: str) -> None:
        with pytest.raises(RequestError, match=text):
            llm.add_lora(LoRARequest("x", 1, str(path)))

    refused(tmp_path / "nowhere", "no such directory")
    refused(tmp_path, "it has no adapter_config.json")
    (tmp_path / "adapter_config.json").write_text("{")
    refused(tmp_path, "cannot be read")
    (tmp_path / "adapter_config.json").write_text("[" * 100_000)
    refused(tmp_path, "cannot be read")
    (tmp_path / "adapter_config.json").write_text(" " * 5_000_000)
    refused(tmp_path, "5,000,000 bytes")
    for endless in (lambda path: os.mkfifo(path), lambda path: path.symlink_to("/dev/zero")):
        (tmp_path / "adapter_config.json").unlink()
        endless(tmp_path / "adapter_config.json")
        refused(tmp_path, "not a regular file")
    (tmp_path / "adapter_config.json").unlink()
    shutil.copy(Path(world.path(0)) / "adapter_config.json", tmp_path)
    refused(tmp_path, "has neither adapter_model.safetensors nor adapter_model.bin")
    (tmp_path / "adapter_model.bin").write_bytes(b"cos\nsystem\n(S'false'\ntR.")
    refused(tmp_path, "is not a readable file of tensors")
    (tmp_path / "adapter_model.safetensors").write_bytes(b"abc")
    refused(tmp_path, "is not a readable safetensors file")
    assert llm.list_loras() == set()


def test_names_and_numbers_are_of_one_adapter(world: LoraWorld, llm: LLM) -> None:
    llm.add_lora(LoRARequest("a", 1, world.path(0)))
    for asked, text in [
        (LoRARequest("b", 1, world.path(1)), "lora_int_id 1 is taken by adapter 'a'"),
        (LoRARequest("a", 2, world.path(0)), "'a' is loaded under lora_int_id 1, not 2"),
        (LoRARequest("a", 1, world.path(1)), "the name 'a' is taken by the adapter from .*load_inplace"),
        (LoRARequest("c", 3), "'c' is not loaded: give its directory"),
    ]:
        with pytest.raises(RequestError, match=text):
            llm.add_lora(asked)
    for wrong in [("", 1), ("a", 0), ("a", True), ("a", "1")]:
        with pytest.raises(RequestError):
            LoRARequest(*wrong)  # type: ignore[arg-type]
    # The same directory by another way.
    for path in (world.path(0) + "/", os.path.relpath(world.path(0))):
        assert not llm.add_lora(LoRARequest("a", 1, path))
    prompts = prompts_of([3, 4])
    with pytest.raises(RequestError, match="one entry per prompt: 2 for 1 prompts"):
        llm.generate(prompts[:1], GREEDY, lora_request=[None, None])
    with pytest.raises(RequestError, match="lora_request must be a LoRARequest"):
        llm.generate(prompts, GREEDY, lora_request="a")  # type: ignore[arg-type]
    assert llm.list_loras() == {1}


def test_an_engine_without_adapters_says_how_to_have_them(tiny: Any, world: LoraWorld) -> None:
    with pytest.raises(ConfigError, match=r"max_cpu_loras \(1\) is below max_loras"):
        LLM(tiny.directory, enable_lora=True, max_loras=2, max_cpu_loras=1)
    with pytest.raises(ConfigError, match="max_lora_rank must be at most 256"):
        LLM(tiny.directory, enable_lora=True, max_lora_rank=512)
    with LLM(tiny.directory, disable_cuda_graph=True, num_pages=20) as llm:
        with pytest.raises(RequestError, match="start the engine with enable_lora=True"):
            llm.generate(prompts_of([3])[0], GREEDY, lora_request=world.asked(0))
        with pytest.raises(RequestError, match="enable_lora=True"):
            llm.list_loras()


def test_adapters_of_the_start(world: LoraWorld) -> None:
    eager = {"disable_cuda_graph": True, "num_pages": 20, "max_lora_rank": 8}
    both = {"zero": world.path(0), "one": world.path(1)}
    with LLM(world.base.directory, lora_paths=both, **eager) as llm:  # SGLang's name
        assert [each.name for each in llm.engine.adapters.listed()] == ["zero", "one"]
        [prompt] = prompts_of([5])
        [output] = llm.generate([prompt], GREEDY, lora_request=LoRARequest("one", 2))
        assert output.outputs[0].token_ids == world.expected(1, prompt)
    for module, text in [
        ("x=/nowhere", "no such directory"),
        ("{", "is not valid JSON"),
        ("=y", "must be name="),
    ]:
        with pytest.raises(ConfigError, match=f"lora_modules: .*{text}"):
            LLM(world.base.directory, lora_modules=[module], **eager)


def test_a_score_has_the_adapter_of_its_pair(world: LoraWorld, tiny_text: TinyModel) -> None:
    """Also where a text is in several pairs."""
    options = {"disable_cuda_graph": True, "num_pages": 20, "max_lora_rank": 8, "enable_lora": True}
    ones, others, numbers = ["hi", "you"], ["you", "hi"], (1, 3)
    with LLM(world.base.directory, tokenizer=tiny_text.directory, **options) as llm:
        asked = [world.asked(number) for number in numbers]
        scores = [each.outputs.score for each in llm.score(ones, others, lora_request=asked)]
        to_one = llm.score("hi", others, lora_request=[None, asked[0]])
        expected = [
            llm.score(one, other, lora_request=adapter)[0].outputs.score
            for one, other, adapter in zip(ones, others, asked, strict=True)
        ]
        assert scores == pytest.approx(expected, abs=1e-5)
        assert abs(scores[0] - scores[1]) > 1e-3
        assert to_one[0].outputs.score == pytest.approx(llm.score("hi", "you")[0].outputs.score, abs=1e-5)
        assert to_one[1].outputs.score == pytest.approx(1.0, abs=1e-5)


def test_everything_else_takes_an_adapter_along(world: LoraWorld, llm: LLM) -> None:
    [prompt] = prompts_of([12], seed=8)
    asked = world.asked(3)
    several = llm.generate(prompt, SamplingParams(n=2, max_tokens=4, seed=1), lora_request=asked)
    assert len(several[0].outputs) == 2
    hidden = world.adapted[3].reference.model(torch.tensor([prompt["prompt_token_ids"]])).last_hidden_state
    [embedded] = llm.embed([prompt], lora_request=asked)
    vector = torch.nn.functional.normalize(hidden[0, -1], dim=0)
    torch.testing.assert_close(torch.tensor(embedded.outputs.embedding), vector, rtol=1e-3, atol=1e-4)
    assert llm.embed([prompt])[0].outputs.embedding != embedded.outputs.embedding
    [scored] = llm.generate(
        [prompt], SamplingParams(max_tokens=1, prompt_logprobs=0, temperature=0), lora_request=asked
    )
    ids = torch.tensor([prompt["prompt_token_ids"]])
    logits = world.adapted[3].reference(ids).logits[0].log_softmax(-1)
    for at, entry in enumerate(scored.prompt_logprobs[1:], 1):
        token = prompt["prompt_token_ids"][at]
        assert entry[token].logprob == pytest.approx(logits[at - 1, token].item(), abs=1e-3)


def test_an_adapter_in_async_calls(world: LoraWorld) -> None:
    prompts = prompts_of([5, 9, 14])

    async def serve() -> None:
        async with AsyncLLM(world.base.directory, disable_cuda_graph=True, max_lora_rank=8, **{
            name: SMALL[name] for name in ("enable_lora", "max_loras", "num_pages")
        }) as llm:  # fmt: skip

            async def one(prompt: Any, number: int | None) -> None:
                async for output in llm.generate(prompt, GREEDY, lora_request=world.asked(number)):
                    last = output
                assert last.outputs[0].token_ids == world.expected(number, prompt)

            await asyncio.gather(*(one(*each) for each in zip(prompts, (0, None, 1), strict=True)))
            assert await llm.add_lora(world.asked(2))  # type: ignore[arg-type]
            assert await llm.list_loras() == {1, 2, 3}
            assert await llm.pin_lora(3)
            assert await llm.remove_lora(1)
            with pytest.raises(RequestError, match="no such directory"):
                await llm.add_lora(LoRARequest("x", 9, "/nowhere"))
            refused = llm.generate(prompts[0], GREEDY, lora_request=LoRARequest("x", 9, "/nowhere"))
            with pytest.raises(RequestError, match="no such directory"):
                await anext(refused)
            async with asyncio.timeout(30):
                await pauses_behind_a_file(llm, world, prompts[0])

    asyncio.run(serve())


async def pauses_behind_a_file(llm: AsyncLLM, world: LoraWorld, prompt: Any) -> None:
    """Whose adapter is being read when a pause that waits begins is served before it; who leaves keeps
    nobody waiting, who comes later waits himself."""
    adapters = llm._llm.engine.adapters
    gate, read, begun = threading.Event(), adapters.read, []

    def gated(path: str) -> Any:
        begun.append(path)
        assert gate.wait(20)
        return read(path)

    async def last_of(name: str) -> Any:
        asked = LoRARequest(name, int(name), world.path(0))
        return [output async for output in llm.generate(prompt, GREEDY, lora_request=asked)][-1]

    async def are_read(count: int) -> None:
        while len(begun) < count:
            await asyncio.sleep(0.001)

    adapters.read = gated  # type: ignore[method-assign]
    early, leaving = (asyncio.create_task(last_of(name)) for name in ("20", "21"))
    await are_read(2)
    pause = asyncio.create_task(llm.pause_generation(mode="wait"))
    await asyncio.sleep(0.05)
    assert not pause.done()
    late = asyncio.create_task(last_of("22"))
    await are_read(3)
    await asyncio.sleep(0.02)
    assert not pause.done()
    leaving.cancel()
    gate.set()
    await asyncio.wait_for(pause, 20)
    assert early.done()
    await asyncio.sleep(0.02)
    assert not late.done()
    await llm.resume_generation()
    for each in (early, late):
        assert (await asyncio.wait_for(each, 20)).outputs[0].token_ids == world.expected(0, prompt)


@pytest.mark.parametrize("level", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_adapters_are_there_after_sleep(world: LoraWorld, level: int) -> None:
    prompts = prompts_of([5, 9, 14])
    options = {**SMALL, "enable_sleep_mode": True, "hostile_wake": True}
    with LLM(world.base.directory, **options) as llm:
        world.check(llm, prompts, [0, 1, None])
        llm.sleep(level)
        llm.wake_up()
        if level == 2:
            llm.update_weights(world.base.directory)
        world.check(llm, prompts, [None, 0, 1])
        world.check(llm, prompts, [2, 0, 3])


def test_a_steady_step_sends_nothing(world: LoraWorld, llm: LLM, monkeypatch: Any) -> None:
    runner, stepwise = llm.engine.core.runner, llm.llm_engine
    for number, prompt in enumerate(prompts_of([3, 4, 5])):
        params = SamplingParams(temperature=0, max_tokens=11)
        stepwise.add_request(str(number), prompt, params, lora_request=world.asked((0, None, 1)[number]))
    running = llm.engine.core.scheduler.running
    while len(running) < 3 or any(request.num_output_tokens < 2 for request in running):
        stepwise.step()
    sent: list[Any] = []
    assert runner.adapters is not None
    monkeypatch.setattr(runner.rows.scatter, "run", lambda *given: sent.append(given))
    monkeypatch.setattr(runner.adapters, "write", lambda *given: sent.append(given))
    before = lora_replays(llm)[True]
    for _ in range(5):
        stepwise.step()
    assert lora_replays(llm)[True] == before + 5
    assert not sent
    monkeypatch.undo()
    while stepwise.has_unfinished_requests():
        stepwise.step()


def test_verify_finds_graphs_that_mix_adapters_up(world: LoraWorld, llm: LLM, monkeypatch: Any) -> None:
    world.check(llm, prompts_of([5, 9, 4]), [0, 1, None])
    outcome = llm.verify(progress=False)
    assert any("lora" in check.graph for check in outcome.checks)
    world.check(llm, prompts_of([5, 9, 4]), [1, None, 0])  # everything is as it was
    stacks = llm.engine.core.runner.adapters
    assert stacks is not None
    real = stacks.write
    monkeypatch.setattr(stacks, "write", lambda slot, adapter: real(1 - slot, adapter))
    with pytest.raises(VerifyError, match="lora"):
        llm.verify(progress=False)


def test_tensors_in_place_of_files(world: LoraWorld, llm: LLM) -> None:
    adapters = llm.engine.adapters
    tensors = adapter_tensors(world.base.reference, seed=50, targets=("v_proj",))
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 4, "target_modules": ["v_proj"]}
    made = adapters.made_of("given", config, tensors)
    given = LoRARequest("given", 9)
    assert adapters.load(given, made)
    for tensor in tensors.values():
        tensor.zero_()  # whoever gave them may go on with them
    [prompt] = prompts_of([6])
    [first] = llm.generate([prompt], GREEDY, lora_request=given)
    assert first.outputs[0].token_ids != world.expected(None, prompt)
    world.check(llm, prompts_of([4, 5, 6, 7]), [0, 1, 2, 3])
    [again] = llm.generate([prompt], GREEDY, lora_request=given)
    assert again.outputs[0].token_ids == first.outputs[0].token_ids


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:mkldnn_matmul")
def test_bf16_is_as_near_to_float32_as_the_merged_model(world: LoraWorld, tmp_path: Path) -> None:
    """One token's logits; the engine's own tolerance of bfloat16."""
    place = tmp_path / "adapter"
    model = write_adapter(place, world.base.reference, seed=77, rank=8)
    [prompt] = prompts_of([24])
    params = SamplingParams(max_tokens=1, temperature=0, logprobs=20)
    with LLM(world.base.directory, dtype="bfloat16", **SMALL) as llm:
        [output] = llm.generate([prompt], params, lora_request=LoRARequest("x", 1, str(place)))
    expected = model(torch.tensor([prompt["prompt_token_ids"]])).logits[0, -1].log_softmax(-1)
    for token, found in output.outputs[0].logprobs[0].items():
        assert abs(found.logprob - expected[token].item()) < 0.3
