"""vLLM's seam for trainers: a class that extends the worker, calls of it, functions of the model."""

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from unittest.mock import patch

import pytest
import torch
from ostinato.distributed.device_communicators.pynccl import PyNcclCommunicator
from ostinato.distributed.utils import StatelessProcessGroup

from engine.conftest import TinyModel, prompts_of
from engine.trainer_process import free_port
from ostinato import LLM, AsyncLLM, EngineArgs, LLMEngine, SamplingParams
from ostinato.engine.parameters.sampling_params import RequestError
from ostinato.engine.sleeping.sleeper import EngineAsleepError
from ostinato.graphs import ConfigError
from ostinato.models import weight_update
from ostinato.models.errors import WeightsError

EXTENSION = "engine.worker_extension.Extension"
OPTIONS = {"max_model_len": 128, "max_running_requests": 2, "progress": False}
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
[PROMPT] = prompts_of((40,))
NORM = "model.norm.weight"


@pytest.fixture(scope="module")
def llm(tiny: TinyModel) -> Iterator[LLM]:
    with LLM(tiny.directory, worker_extension_cls=EXTENSION, enable_sleep_mode=True, **OPTIONS) as llm:
        yield llm


def said(llm: LLM) -> list[int]:
    return llm.generate(PROMPT, GREEDY)[0].outputs[0].token_ids


def test_an_extension_finds_what_it_reaches_for(llm: LLM) -> None:
    [about] = llm.collective_rpc("about")
    assert about == {"rank": 0, "dtype": "torch.float32", "device": "cpu", "hidden": 32}
    assert llm.collective_rpc(lambda worker, more: (worker.rank, more), args=(3,)) == [(0, 3)]


def test_weights_go_the_way_of_all_updates(llm: LLM) -> None:
    before, version = said(llm), int(llm.weight_version)
    kwargs = {"name": NORM, "dtype": "float32", "shape": [32], "value": -0.7}
    assert llm.collective_rpc("update_weight", kwargs=kwargs) == [None]
    [output] = llm.generate(PROMPT, GREEDY)
    assert output.outputs[0].token_ids != before
    assert (output.num_cached_tokens, int(llm.weight_version)) == (0, version + 1)
    with pytest.raises(WeightsError, match="has shape"):
        llm.collective_rpc("update_weight", args=(NORM, "float32", [31], 0.1))
    assert llm.collective_rpc("reload_weights") == [None]
    assert said(llm) == before


def test_parameters_have_vllms_names_and_writing_to_them_is_seen(llm: LLM, tiny: TinyModel) -> None:
    before = said(llm)
    [shapes] = llm.apply_model(
        lambda model: {name: tuple(each.shape) for name, each in model.named_parameters()}
    )
    assert shapes["model.layers.0.self_attn.qkv_proj.weight"] == (64, 32)
    assert shapes["model.layers.1.mlp.gate_up_proj.weight"] == (96, 32)
    assert {"model.embed_tokens.weight", "lm_head.weight", NORM} < shapes.keys()
    [count] = llm.apply_model(lambda model: sum(each.numel() for each in model.parameters()))
    assert count == sum(each.numel() for each in tiny.reference.parameters())
    assert llm.apply_model(lambda model: model.state_dict().keys()) == [shapes.keys()]
    llm.collective_rpc("scale_in_place", args=(NORM, -1.0))
    [output] = llm.generate(PROMPT, GREEDY)
    assert output.outputs[0].token_ids != before
    assert not output.num_cached_tokens, "KV of the old weights"
    llm.collective_rpc("reload_weights")
    assert said(llm) == before
    with pytest.raises(RequestError, match="cannot be run"):
        llm.apply_model(lambda model: model(torch.zeros(1)))


def test_what_would_do_nothing_to_a_workers_model_is_refused(llm: LLM) -> None:
    for function in (
        lambda model: model.load_state_dict({NORM: torch.zeros(32)}, strict=False),
        lambda model: model.to(torch.float16),
        lambda model: model.double(),
        lambda model: model.apply(lambda module: None),
        lambda model: [*model.modules()],
        lambda model: model.register_forward_hook(lambda *_: None),
    ):
        with pytest.raises(RequestError, match="a worker's model"):
            llm.apply_model(function)
    assert llm.apply_model(lambda model: model.eval().float().to("cpu") is model) == [True]


def test_nobody_gets_weights_that_are_away(llm: LLM) -> None:
    before = said(llm)
    llm.sleep(level=1)
    for read in (lambda: llm.apply_model(lambda model: [*model.parameters()]), llm.shared_weights):
        with pytest.raises(EngineAsleepError, match="released: weights"):
            read()
    llm.wake_up()
    assert said(llm) == before


def test_trls_workaround_after_a_deep_sleep(llm: LLM) -> None:
    before = said(llm)
    llm.sleep(level=2)
    llm.wake_up(["weights"])
    llm.collective_rpc("reload_weights")
    llm.wake_up(["kv_cache"])
    llm.reset_prefix_cache()
    assert said(llm) == before


def test_trls_weights_come_one_by_one_after_a_deep_sleep(llm: LLM, tiny: TinyModel) -> None:
    before = said(llm)
    llm.sleep(level=2)
    llm.wake_up(tags=["weights"])
    parameters = list(tiny.reference.named_parameters())
    model = llm.llm_engine.model_executor.driver_worker.model_runner.model
    with patch.object(weight_update, "checkpoint_tensors", side_effect=AssertionError("each time anew")):
        for name, parameter in parameters[:-1]:
            assert model.load_weights([(name, parameter.data)]) == {name}
    llm.wake_up(tags=["kv_cache"])
    with pytest.raises(EngineAsleepError, match="dropped by sleep"):
        said(llm)
    model.load_weights([(parameters[-1][0], parameters[-1][1].data)])
    assert llm.reset_prefix_cache() is True
    assert said(llm) == before


def test_calls_that_cannot_be(llm: LLM) -> None:
    before = said(llm)
    for method, args in (("no_such_method", ()), ("_link", ()), ("about", (1,)), ("add_lora", (1,))):
        with pytest.raises(RequestError):
            llm.collective_rpc(method, args=args)
    with pytest.raises(KeyError, match="by itself"):
        llm.collective_rpc("fail")
    with pytest.raises(TimeoutError):
        llm.collective_rpc("take_long", timeout=0.05, args=(0.5,))
    assert said(llm) == before, "it was waited for"
    assert llm.collective_rpc("take_long", timeout=30, args=(0.0,)) == ["late"]


@pytest.mark.parametrize(
    ("path", "why"),
    [
        ("no.such.module.Class", "cannot be imported"),
        ("engine.worker_extension.Nothing", "cannot be imported"),
        ("engine.worker_extension.EXTENSION", "cannot be imported"),
        ("engine.worker_extension.time", "is not a class"),
        ("Extension", "cannot be imported"),
        ("engine.worker_extension.Clashing", "which a worker has itself"),
    ],
)
def test_classes_that_cannot_be(tiny: TinyModel, path: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        LLM(tiny.directory, worker_extension_cls=path, **OPTIONS)


def test_an_engine_whose_worker_nobody_could_call(tiny: TinyModel) -> None:
    with pytest.raises(ConfigError, match="only with LLM and AsyncLLM"):
        LLMEngine.from_engine_args(EngineArgs(tiny.directory, worker_extension_cls=EXTENSION))


def test_groups_that_extensions_make_themselves() -> None:
    """As TRL's does: the worker is rank 0, the trainer the last one and the source; of thousands of barriers
    nothing stays in the store."""
    port = free_port()
    kept: dict[int, list[int]] = {0: [], 1: []}
    sent = [torch.arange(6.0), torch.ones(2, 3)]

    def rank(number: int, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        group = StatelessProcessGroup.create(host="127.0.0.1", port=port, rank=number, world_size=2)
        communicator = PyNcclCommunicator(group, device="cpu")
        for tensor in tensors:
            communicator.broadcast(tensor, src=1)
            communicator.group.barrier()
            kept[number].append(group.store.num_keys())
        return tensors

    with ThreadPoolExecutor() as threads:
        worker = threads.submit(rank, 0, [torch.zeros(6), torch.zeros(2, 3)])
        threads.submit(rank, 1, sent).result()
        received = worker.result()
    assert all(torch.equal(one, two) for one, two in zip(received, sent, strict=True))
    assert len(set(kept[0])) == 1


def test_the_same_with_coroutines(tiny: TinyModel) -> None:
    async def run() -> None:
        async with AsyncLLM(tiny.directory, worker_extension_cls=EXTENSION, **OPTIONS) as llm:
            [about] = await llm.collective_rpc("about")
            assert about["hidden"] == 32
            task = asyncio.create_task(_last(llm))
            await asyncio.sleep(0.01)
            await llm.collective_rpc("update_weight", args=(NORM, "float32", [32], 0.5))
            assert len(await task) == 40, "a request that was under way goes on"
            assert await llm.get_weight_version() == "1"
            assert len(await llm.apply_model(lambda model: list(model.parameters()))) == 1
            with pytest.raises(TimeoutError):
                await llm.collective_rpc("take_long", timeout=0.05, args=(0.3,))
            with pytest.raises(KeyError):
                await llm.collective_rpc("fail")

    asyncio.run(run())


async def _last(llm: AsyncLLM) -> list[int]:
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    async for output in llm.generate(PROMPT, params):
        found = output.outputs[0].token_ids
    return found
