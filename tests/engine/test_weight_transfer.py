"""Weights from a trainer's process: by shared memory, through a group, in vLLM's calls; all or nothing."""

import asyncio
import base64
import pickle
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.conftest import TinyModel, prompts_of
from engine.trainer_process import (
    Trainer,
    bucket_entry,
    flattened,
    free_port,
    nccl_id_class,
    serialized,
)
from ostinato import LLM, AsyncLLM, SamplingParams
from ostinato.engine.weight_sync.errors import TransferError, TransferTimeout
from ostinato.engine.weight_sync.patience import Patience
from ostinato.engine.weight_sync.shared_buffer import SharedBuffer
from ostinato.engine.weight_sync.stateless_nccl import pickled_id, unique_id
from ostinato.engine.weight_sync.trainer_link import TrainerLink, done_here
from ostinato.models.errors import WeightsError
from ostinato.models.weights import checkpoint_tensors

OPTIONS = {"max_model_len": 128, "max_running_requests": 4, "load_format": "dummy", "progress": False}
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
PROMPTS = prompts_of((40, 21))
NORM = "model.norm.weight"


def tokens(llm: LLM) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in llm.generate(PROMPTS, GREEDY)]


def weights_of(llm: LLM) -> dict[str, torch.Tensor]:
    return {name: view.clone() for name, view in checkpoint_tensors(llm.engine.core.loaded.model).items()}


@pytest.fixture(scope="module")
def llm(tiny: TinyModel) -> Iterator[LLM]:
    with LLM(tiny.directory, **OPTIONS) as llm:
        yield llm


@pytest.fixture(scope="module")
def first(llm: LLM) -> tuple[dict[str, torch.Tensor], list[list[int]]]:
    """What the engine begins with, and says."""
    return weights_of(llm), tokens(llm)


@pytest.fixture(scope="module")
def second(llm: LLM, first) -> tuple[dict[str, torch.Tensor], list[list[int]]]:
    """Other weights, and what is said with them."""
    generator = torch.Generator().manual_seed(1)
    new = {name: each + 0.3 * torch.randn(each.shape, generator=generator) for name, each in first[0].items()}
    llm.update_weights(new)
    said = tokens(llm)
    assert said != first[1]
    llm.update_weights(first[0])
    return new, said


@pytest.fixture(scope="module")
def trainer(second, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trainer]:
    """It has the other weights."""
    file = tmp_path_factory.mktemp("trainer") / "weights.pt"
    torch.save(second[0], file)
    trainer = Trainer()
    trainer.do("load", file=str(file))
    yield trainer
    trainer.close()


@pytest.fixture(autouse=True)
def begin_with_the_first(llm: LLM, first) -> None:
    llm.update_weights(first[0], version="first")


@pytest.mark.parametrize("kind", ["list", "bucket", "bytes"])
def test_tensors_of_another_process(llm: LLM, trainer: Trainer, second, kind: str) -> None:
    payload = trainer.do("serialize", kind=kind)
    load_format = "flattened_bucket" if kind == "bucket" else None
    report = done_here(llm.trainer_link.update_from_tensors([payload], load_format, "7"))
    assert (report.version, llm.get_weight_version(), report.missing) == ("7", "7", 0)
    assert set(report.names) == set(second[0])
    assert tokens(llm) == second[1]


def group_of(llm: LLM, trainer: Trainer, name: str) -> None:
    port = free_port()
    trainer.begin("meet", port=port, name=name)
    done_here(llm.trainer_link.join(name, "127.0.0.1", port, 1, 2, "gloo"))
    trainer.end()


def update_from(link: TrainerLink, trainer: Trainer, name: str, *, bucket: bool, **how: Any) -> Any:
    announced = trainer.do("announce", **how)
    trainer.begin("broadcast", bucket=bucket, **how)
    load_format = "flattened_bucket" if bucket else None
    try:
        return done_here(link.update_from_group(name, *announced.values(), load_format, None))
    finally:
        trainer.end()


def test_a_group_of_torch_as_the_clients_of_sglang_make_it(llm: LLM, trainer: Trainer, first, second) -> None:
    group_of(llm, trainer, "slime-pp_0")
    for bucket in (False, True):
        update_from(llm.trainer_link, trainer, "slime-pp_0", bucket=bucket)
        assert tokens(llm) == second[1]
        llm.update_weights(first[0])
    done_here(llm.trainer_link.leave("slime-pp_0"))
    trainer.do("part")
    with pytest.raises(TransferError, match="unknown group 'slime-pp_0'"):
        done_here(llm.trainer_link.leave("slime-pp_0"))


def test_what_does_not_fit_is_received_and_refused_and_the_group_lives(
    llm: LLM, trainer: Trainer, first, second
) -> None:
    group_of(llm, trainer, "again")
    names, dtypes, shapes = trainer.do("announce", names=[NORM]).values()
    for bad in (["no.such.weight"], ["model.embed_tokens.weight"]):
        trainer.begin("broadcast", names=[NORM])
        with pytest.raises(WeightsError):
            done_here(llm.trainer_link.update_from_group("again", bad, dtypes, shapes, None, None))
        trainer.end()
    huge = [[2**40, 2**10]]
    with pytest.raises(TransferError, match="at most"):
        done_here(llm.trainer_link.update_from_group("again", names, dtypes, huge, None, None))
    with pytest.raises(TransferError, match="same length, not 1, 0 and"):
        done_here(llm.trainer_link.update_from_group("again", names, [], shapes, None, None))
    assert (tokens(llm), llm.weight_version) == (first[1], "first")
    update_from(llm.trainer_link, trainer, "again", bucket=False)
    assert tokens(llm) == second[1]
    done_here(llm.trainer_link.leave("again"))


def test_a_trainer_that_does_not_come_is_waited_for_no_longer_than_agreed(llm: LLM, first, trainer) -> None:
    link = TrainerLink(llm.engine.core.loaded.model, llm._apply, 0.5)
    with pytest.raises(TransferError, match="rendezvous"):
        done_here(link.join("nobody", "127.0.0.1", free_port(), 1, 2, "gloo"))
    link.patience.seconds = 10
    port = free_port()
    trainer.begin("meet", port=port, name="late")
    done_here(link.join("late", "127.0.0.1", port, 1, 2, "gloo"))
    trainer.end()
    link.patience.seconds = 0.5
    began = time.monotonic()
    with pytest.raises(TransferTimeout, match="a broadcast"):
        done_here(link.update_from_group("late", [NORM], ["float32"], [[32]], None, None))
    assert time.monotonic() - began < 10
    with pytest.raises(TransferError, match="unknown group 'late'"):
        done_here(link.update_from_group("late", [NORM], ["float32"], [[32]], None, None))
    assert (tokens(llm), llm.weight_version) == (first[1], "first")


def test_a_later_meeting_ends_the_wait_for_an_earlier_one(llm: LLM, trainer: Trainer, second) -> None:
    link = llm.trainer_link
    with ThreadPoolExecutor() as threads:
        nobody = threads.submit(done_here, link.join("group", "127.0.0.1", free_port(), 1, 2, "gloo"))
        time.sleep(0.1)
        group_of(llm, trainer, "group")
        with pytest.raises(TransferError, match="abandoned in favour of a later call"):
            nobody.result()
    update_from(link, trainer, "group", bucket=False)
    assert tokens(llm) == second[1]
    done_here(link.leave("group"))


def test_three_calls_of_vllm(llm: LLM, trainer: Trainer, first, second) -> None:
    port = free_port()
    trainer.begin("meet_plainly", port=port)
    place = {"master_address": "127.0.0.1", "master_port": port, "rank_offset": 1, "world_size": 2}
    packed = {"packed": True, "packed_buffer_size_bytes": 20_000, "packed_num_buffers": 2}
    llm.init_weight_transfer_engine({"init_info": {**place, **packed}})
    trainer.end()
    names = list(second[0])

    def send(chosen: list[str]) -> None:
        names, dtypes, shapes = trainer.do("announce", names=chosen).values()
        trainer.begin("broadcast", names=chosen, packed=20_000)
        llm.update_weights({"update_info": {"names": names, "dtype_names": dtypes, "shapes": shapes}})
        trainer.end()

    with pytest.raises(TransferError, match="start_weight_update"):
        llm.update_weights({"update_info": {"names": [], "dtype_names": [], "shapes": []}})
    llm.start_weight_update()
    send(names[:5])
    assert (tokens(llm), llm.weight_version) == (first[1], "first"), "nothing is used before the end"
    llm.start_weight_update()
    send(names[:3])
    send(names[3:])
    report = llm.finish_weight_update(weight_version="step-1")
    assert report is not None
    assert (len(report.names), llm.weight_version) == (len(names), "step-1")
    assert tokens(llm) == second[1]
    with pytest.raises(TransferError, match="no update is under way"):
        llm.finish_weight_update()
    llm.update_weight_version("renamed")
    assert llm.weight_version == "renamed"
    for bad, said in (
        ({"master_address": "x"}, "must also have"),
        ({"backend": "nccl"}, "has no field backend"),
    ):
        with pytest.raises(TransferError, match=said):
            llm.init_weight_transfer_engine({"init_info": bad})
    trainer.do("part")


def test_requests_go_on_while_weights_are_on_their_way(tiny: TinyModel, trainer: Trainer, second) -> None:
    async def run() -> None:
        async with AsyncLLM(tiny.directory, **OPTIONS) as llm:
            port = free_port()
            trainer.begin("meet_plainly", port=port)
            place = {"master_address": "127.0.0.1", "master_port": port, "rank_offset": 1, "world_size": 2}
            await llm.init_weight_transfer_engine({"init_info": place})
            trainer.end()
            names, dtypes, shapes = trainer.do("announce").values()
            await llm.start_weight_update()
            info = {"names": names, "dtype_names": dtypes, "shapes": shapes}
            part = asyncio.create_task(llm.update_weights({"update_info": info}))
            async for _ in llm.generate(PROMPTS[0], GREEDY):
                assert not part.done(), "nobody has sent anything yet"
            trainer.begin("broadcast")
            await part
            trainer.end()
            await llm.finish_weight_update("8")
            assert await llm.get_weight_version() == "8"
            async for output in llm.generate(PROMPTS[0], GREEDY):
                said = output.outputs[0].token_ids
            assert said == second[1][0]
            trainer.do("part")

    asyncio.run(run())


class Touches:
    """A pickle that does something."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


def test_a_pickle_that_names_anything_else_is_not_run(llm: LLM, first, tmp_path: Path) -> None:
    file = tmp_path / "touched"
    hostile = [
        pickle.dumps(Touches(file)),
        pickle.dumps([("a", Touches(file))]),
        pickle.dumps(eval),
        b"\x80\x04cposix\nsystem\nX\x04\x00\x00\x00true\x85R.",
        b"cos\nsystem\n(S'true'\ntR.",
        # Attributes of a class: harmless names, put to another use.
        b"\x80\x04ctorch.storage\nTypedStorage\nN}\x8c\x07hostilectorch\nSize\ns\x86b.",
        # A memo of 2**32 entries takes all memory there is.
        b"\x80\x02Nr\xff\xff\xff\xff.",
        b"",
        b"\x80\x04",
        pickle.dumps([("a", torch.ones(3))])[:-20],
    ]
    for data in hostile:
        payload = base64.b64encode(data).decode()
        for load_format in (None, "flattened_bucket"):
            with pytest.raises(TransferError):
                done_here(llm.trainer_link.update_from_tensors([payload], load_format, None))
    assert not file.exists()
    assert not hasattr(torch.storage.TypedStorage, "hostile")
    for payloads in ([], ["!!!"], [1], "text", [serialized([]), serialized([])]):
        with pytest.raises(TransferError):
            done_here(llm.trainer_link.update_from_tensors(payloads, None, None))
    assert (tokens(llm), llm.weight_version) == (first[1], "first")


def changed(bucket: dict[str, Any], **fields: Any) -> dict[str, Any]:
    entry = bucket["metadata"][0]
    for name, value in fields.items():
        setattr(entry, name, value)
    return bucket


def test_sizes_are_checked_against_the_memory_that_is_there(llm: LLM, first) -> None:
    norm = first[0][NORM]
    entry = bucket_entry()

    def bucket() -> dict[str, Any]:
        return flattened({NORM: norm.clone()}, entry)

    bad: list[Any] = [
        changed(bucket(), end_idx=2**40),
        changed(bucket(), start_idx=8),
        changed(bucket(), start_idx=-8),
        changed(bucket(), shape=torch.Size([2**40])),
        changed(bucket(), dtype=torch.int64),
        changed(bucket(), name=3),
        {"flattened_tensor": norm},
        {"flattened_tensor": 1, "metadata": []},
        [],
    ]
    for given in bad:
        with pytest.raises((TransferError, WeightsError)):
            done_here(llm.trainer_link.update_from_tensors([serialized(given)], "flattened_bucket", None))
    stored = pickle.dumps([(NORM, norm)])
    shape = b"K \x85"
    assert stored.count(shape) == 1
    for grown in (stored.replace(shape, b"K\xff\x85"), stored.replace(shape, b"J\xff\xff\xff\xff\x85")):
        payload = base64.b64encode(grown).decode()
        with pytest.raises(TransferError):
            done_here(llm.trainer_link.update_from_tensors([payload], None, None))
    assert (tokens(llm), llm.weight_version) == (first[1], "first")


def test_shared_memory_that_is_shorter_than_said_or_gone(llm: LLM, trainer: Trainer, first) -> None:
    payload = base64.b64decode(trainer.do("serialize", kind="list", names=[NORM]))
    assert payload.count(b"K\x80t") == 1  # 128 bytes
    longer = payload.replace(b"K\x80t", b"K\xfft")
    elsewhere = payload.replace(b"/torch_", b"/other_")
    digit = payload.index(b"/torch_") + len(b"/torch_")
    gone = payload[:digit] + (b"9" if payload[digit : digit + 1] != b"9" else b"8") + payload[digit + 1 :]
    bad_ones = (
        (longer, "128 bytes, fewer than"),
        (elsewhere, "not one that torch"),
        (gone, "does not exist"),
    )
    for bad, said in bad_ones:
        text = base64.b64encode(bad).decode()
        with pytest.raises(TransferError, match=said):
            done_here(llm.trainer_link.update_from_tensors([text], None, None))
    assert (tokens(llm), llm.weight_version) == (first[1], "first")


def test_the_id_of_vllms_group_is_read_and_nothing_else() -> None:
    id = nccl_id_class().from_buffer_copy(bytes(range(128)))  # type: ignore[attr-defined]
    assert unique_id(pickle.dumps(id)) == bytes(range(128))
    assert bytes(pickle.loads(pickled_id(bytes(range(128))))) == bytes(range(128)), "as vLLM reads it"
    assert unique_id(pickled_id(bytes(range(128)))) == bytes(range(128))
    shorter = pickle.dumps(id).replace(b"C\x80", b"C\x7f")
    for bad in (pickle.dumps(b"x" * 128), pickle.dumps(eval), b"", shorter):
        with pytest.raises(TransferError):
            unique_id(bad)


def test_one_transfer_at_a_time(llm: LLM, trainer: Trainer) -> None:
    link = llm.trainer_link
    operation = link.update_from_tensors([serialized([])], None, None)
    next(operation)
    with pytest.raises(TransferError, match="another transfer"):
        done_here(link.update_from_tensors([serialized([])], None, None))
    operation.close()
    done_here(link.update_from_tensors([serialized([])], None, None))


def test_weights_can_be_looked_at(llm: LLM, first, second) -> None:
    checks = llm.trainer_link.checks
    assert checks.values(NORM, 3) == first[0][NORM][:3].tolist()
    assert checks.values("norm.weight", 3) == checks.values(NORM, 3)
    with pytest.raises(TransferError, match="unknown weight"):
        checks.values("no.such", 1)
    with pytest.raises(TransferError, match="snapshot first"):
        checks.run("compare")
    checks.run("snapshot")
    sums = checks.run("checksum")
    assert checks.run("compare")["success"]
    checks.run("reset_tensors")
    told = checks.run("compare")
    assert not told["success"]
    assert "weights differ" in told["message"]
    assert checks.run("checksum")["per_engine_checksum"] != sums["per_engine_checksum"]
    llm.update_weights(first[0])
    assert checks.run("compare")["success"]
    assert checks.run("checksum") == sums
    embedding = "model.embed_tokens.weight"
    llm.update_weights({embedding: first[0][embedding].flip(0)})
    assert checks.run("checksum") != sums, "the same numbers, elsewhere"
    with pytest.raises(TransferError, match="unknown action"):
        checks.run("break")


def test_nobody_waits_for_ever_for_a_buffer(tmp_path: Path) -> None:
    buffer = SharedBuffer(f"ipc://{tmp_path}/nobody", torch.device("cpu"), Patience(0.2), 1000)
    try:
        with pytest.raises(TransferTimeout, match=r"nobody took longer than 0\.2 s"):
            buffer.received()
    finally:
        buffer.close()
