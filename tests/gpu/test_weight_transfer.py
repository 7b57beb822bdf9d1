"""Weights of a trainer's process on the same GPU: CUDA IPC in both formats, gloo, NCCL's library."""

import base64
import ctypes
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from engine.conftest import TinyModel, prompts_of
from engine.trainer_process import Trainer, free_port
from ostinato import LLM, SamplingParams
from ostinato.engine.weight_sync import received_weights
from ostinato.engine.weight_sync.errors import TransferError
from ostinato.engine.weight_sync.nccl_library import ID_BYTES, Communicator
from ostinato.engine.weight_sync.trainer_link import done_here
from ostinato.models.weights import checkpoint_tensors

OPTIONS = {"max_model_len": 128, "max_running_requests": 4, "load_format": "dummy", "progress": False}
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
PROMPTS = prompts_of((40, 21))
NORM = "model.norm.weight"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    pytest.importorskip("transformers")
    return TinyModel(tmp_path_factory.mktemp("llama"), "Llama")


def tokens(llm: LLM) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in llm.generate(PROMPTS, GREEDY)]


@pytest.fixture(scope="module")
def llm(tiny: TinyModel) -> Iterator[LLM]:
    with LLM(tiny.directory, dtype="bfloat16", **OPTIONS) as llm:
        yield llm


@pytest.fixture(scope="module")
def first(llm: LLM) -> tuple[dict[str, torch.Tensor], list[list[int]]]:
    views = checkpoint_tensors(llm.engine.core.loaded.model)
    return {name: view.clone() for name, view in views.items()}, tokens(llm)


@pytest.fixture(scope="module")
def second(llm: LLM, first) -> tuple[dict[str, torch.Tensor], list[list[int]]]:
    torch.manual_seed(1)
    new = {name: each + 0.3 * torch.randn_like(each) for name, each in first[0].items()}
    llm.update_weights(new)
    said = tokens(llm)
    assert said != first[1]
    return new, said


@pytest.fixture(scope="module")
def trainer(second, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trainer]:
    file = tmp_path_factory.mktemp("trainer") / "weights.pt"
    torch.save({name: each.cpu() for name, each in second[0].items()}, file)
    trainer = Trainer()
    trainer.do("load", file=str(file), device="cuda")
    yield trainer
    trainer.close()


@pytest.fixture(autouse=True)
def begin_with_the_first(llm: LLM, first) -> None:
    llm.update_weights(first[0], version="first")


@pytest.mark.parametrize("kind", ["list", "bucket"])
def test_memory_that_another_process_shares_and_uses_again(
    llm: LLM, trainer: Trainer, second, kind: str
) -> None:
    for _ in range(3):
        payload = trainer.do("serialize", kind=kind)
        assert b"_rebuild_cuda_tensor_modified" in base64.b64decode(payload)
        load_format = "flattened_bucket" if kind == "bucket" else None
        done_here(llm.trainer_link.update_from_tensors([payload], load_format, "7"))
        trainer.do("overwrite")
        assert tokens(llm) == second[1]


@pytest.mark.parametrize("packed", [False, True], ids=["each", "packed"])
@pytest.mark.parametrize("is_on_host", [False, True], ids=["device", "host"])
def test_handles_of_vllm(
    llm: LLM,
    trainer: Trainer,
    first,
    second,
    packed: bool,
    is_on_host: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if is_on_host:
        monkeypatch.setattr(received_weights, "_SPARE", 2**60)
    names = list(second[0])
    llm.init_weight_transfer_engine({"init_info": {"packed": packed}})
    llm.start_weight_update()
    for part in (names[:4], names[4:]):
        llm.update_weights({"update_info": trainer.do("handles", packed=packed, names=part)})
        trainer.do("overwrite")
    assert tokens(llm) == first[1], "nothing is used before the end"
    llm.finish_weight_update("8")
    assert (tokens(llm), llm.weight_version) == (second[1], "8")


def test_sizes_are_checked_against_the_memory_that_is_there(llm: LLM, trainer: Trainer, first) -> None:
    payload = base64.b64decode(trainer.do("serialize", kind="list", names=[NORM]))
    size = b"K@"  # 64 bytes
    assert payload.count(size)
    for bad in (payload.replace(size, b"J\xff\xff\xff\x7f"), payload[:-30]):
        text = base64.b64encode(bad).decode()
        with pytest.raises(TransferError):
            done_here(llm.trainer_link.update_from_tensors([text], None, None))
    uuid = str(torch.cuda.get_device_properties(0).uuid).encode()
    other = payload.replace(uuid, b"0" * len(uuid))
    with pytest.raises(TransferError, match="sees no GPU"):
        done_here(llm.trainer_link.update_from_tensors([base64.b64encode(other).decode()], None, None))
    assert (tokens(llm), llm.weight_version) == (first[1], "first")
    trainer.do("overwrite")


def test_a_buffer_that_checkpoint_engine_fills(llm: LLM, trainer: Trainer, second, tmp_path: Any) -> None:
    address, uuid = f"ipc://{tmp_path}/buffer", torch.cuda.get_device_properties(0).uuid
    largest = max(weight.nbytes for weight in second[0].values())
    for _ in range(2):
        llm.update_weights({NORM: torch.zeros_like(second[0][NORM])})
        trainer.begin("lend_buffer", address=address, size=largest, names=list(second[0]))
        done_here(llm.trainer_link.update_through_buffer({f"GPU-{uuid}": address}, "9"))
        assert trainer.end() == ["", "", ""]
        assert (tokens(llm), llm.weight_version) == (second[1], "9")


def test_gloo_to_an_engine_on_a_gpu(llm: LLM, trainer: Trainer, second) -> None:
    port = free_port()
    trainer.begin("meet", port=port, name="group")
    done_here(llm.trainer_link.join("group", "127.0.0.1", port, 1, 2, "gloo"))
    trainer.end()
    announced = trainer.do("announce")
    trainer.begin("broadcast")
    done_here(llm.trainer_link.update_from_group("group", *announced.values(), None, None))
    trainer.end()
    assert tokens(llm) == second[1]
    done_here(llm.trainer_link.leave("group"))


def test_functions_of_nccl_are_called_as_they_want_it() -> None:
    library = ctypes.CDLL("libnccl.so.2")
    id = (ctypes.c_byte * ID_BYTES)()
    assert library.ncclGetUniqueId(ctypes.byref(id)) == 0
    device = torch.device("cuda", 0)
    communicator = Communicator(bytes(id), 0, 1, device)
    tensor = torch.full((5,), 3.0, device=device)
    communicator.sum_floats(tensor)
    torch.cuda.synchronize()
    assert tensor.tolist() == [3.0] * 5
    communicator.abort()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="NCCL wants a GPU for each rank")
@pytest.mark.parametrize("style", ["sglang", "vllm"])
def test_nccl_from_another_gpu(llm: LLM, second, style: str, tmp_path: Any) -> None:
    file = tmp_path / "weights.pt"
    torch.save({name: each.cpu() for name, each in second[0].items()}, file)
    trainer, port = Trainer(), free_port()
    try:
        trainer.do("load", file=str(file), device="cuda:1")
        names, dtypes, shapes = trainer.do("announce").values()
        if style == "sglang":
            trainer.begin("meet", port=port, name="nccl", backend="nccl")
            done_here(llm.trainer_link.join("nccl", "127.0.0.1", port, 1, 2, "nccl"))
            trainer.end()
            trainer.begin("broadcast")
            done_here(llm.trainer_link.update_from_group("nccl", names, dtypes, shapes, None, None))
        else:
            place = {"master_address": "127.0.0.1", "master_port": port, "rank_offset": 1, "world_size": 2}
            trainer.begin("meet_as_vllm", port=port)
            llm.init_weight_transfer_engine({"init_info": {**place, "packed": True}})
            trainer.end()
            llm.start_weight_update()
            trainer.begin("broadcast", packed=2**30)
            info = {"names": names, "dtype_names": dtypes, "shapes": shapes}
            llm.update_weights({"update_info": info})
            llm.finish_weight_update()
        trainer.end()
        assert tokens(llm) == second[1]
    finally:
        trainer.close()
