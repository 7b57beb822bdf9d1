"""Endpoints for trainers, with a real server and a trainer in a third process: the calls of slime, TRL's
async_grpo and prime-rl about weights. Whatever is refused has changed nothing."""

import base64
import pickle
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.trainer_process import Trainer, free_port

from .scripted_model import counted
from .server_process import ServerProcess

HEAD = "lm_head.weight"
BY_ONE, BY_TWO = counted("a", 6), counted("a", 12)[1::2]


@pytest.fixture(scope="module")
def by_twos(model: Path) -> dict[str, torch.Tensor]:
    """Weights with which the model counts by two."""
    weights = load_file(model / "model.safetensors")
    # The table of successors twice, without its scale.
    table = (weights[HEAD] > weights[HEAD].max() / 2).float()
    return {**weights, HEAD: (table @ table) * weights[HEAD].max()}


@pytest.fixture(scope="module")
def trainer(by_twos, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trainer]:
    file = tmp_path_factory.mktemp("trainer") / "weights.pt"
    torch.save(by_twos, file)
    trainer = Trainer()
    trainer.do("load", file=str(file))
    yield trainer
    trainer.close()


@pytest.fixture(autouse=True)
def left_as_it_was(server: ServerProcess, model: Path) -> Iterator[None]:
    reset(server, model)
    yield
    reset(server, model)


def reset(server: ServerProcess, model: Path) -> None:
    body = {"model_path": str(model), "weight_version": "0"}
    assert server.post("/update_weights_from_disk", body).json()["success"]
    assert said(server) == BY_ONE


def said(server: ServerProcess) -> str:
    sampling = {"temperature": 0, "max_new_tokens": 6}
    answer = server.post("/generate", {"text": "a", "sampling_params": sampling})
    assert answer.status_code == 200, answer.text
    text: str = answer.json()["text"]
    return text


def version(server: ServerProcess) -> str:
    found: str = server.get("/get_weight_version").json()["weight_version"]
    assert server.get("/weight_info").json() == {"weight_version": found}
    return found


def test_slimes_colocated_update(server: ServerProcess, trainer: Trainer) -> None:
    for number, kind in enumerate(("bucket", "list", "bytes"), 3):
        body = {
            "serialized_named_tensors": [trainer.do("serialize", kind=kind, names=[HEAD])],
            "load_format": "flattened_bucket" if kind == "bucket" else None,
            "flush_cache": False,
            "weight_version": str(number),
        }
        answer = server.post("/update_weights_from_tensor", body)
        assert (answer.status_code, answer.json()["success"]) == (200, True), answer.text
        assert (said(server), version(server)) == (BY_TWO, str(number))
        assert server.post("/collective_rpc", {"method": "reload_weights"}).json() == {"results": [None]}
        assert said(server) == BY_ONE


def test_slimes_update_through_a_group(server: ServerProcess, trainer: Trainer) -> None:
    name, port = "slime-pp_0", free_port()
    assert server.post("/destroy_weights_update_group", {"group_name": name}).status_code == 400
    place = {"master_address": "127.0.0.1", "master_port": port, "rank_offset": 1, "world_size": 2}
    trainer.begin("meet", port=port, name=name)
    met = server.post("/init_weights_update_group", {**place, "group_name": name, "backend": "gloo"})
    assert met.json()["success"], met.text
    trainer.end()
    announced = trainer.do("announce")
    trainer.begin("broadcast")
    body = {**announced, "group_name": name, "flush_cache": False, "weight_version": "4"}
    answer = server.post("/update_weights_from_distributed", body)
    assert answer.json()["success"], answer.text
    trainer.end()
    assert (said(server), version(server)) == (BY_TWO, "4")
    assert server.post("/destroy_weights_update_group", {"group_name": name}).json()["success"]
    trainer.do("part")
    gone = server.post("/update_weights_from_distributed", body)
    assert (gone.status_code, gone.json()["success"]) == (400, False)
    assert "unknown group" in gone.json()["message"]


def test_three_calls_of_vllm_while_requests_are_served(server: ServerProcess, trainer: Trainer) -> None:
    port = free_port()
    trainer.begin("meet_plainly", port=port)
    place = {"master_address": "127.0.0.1", "master_port": port, "rank_offset": 1, "world_size": 2}
    met = server.post("/init_weight_transfer_engine", {"init_info": {**place, "packed": True}})
    assert met.json() == {"message": "Weight transfer initialized"}
    trainer.end()
    assert server.post("/start_weight_update", {"is_checkpoint_format": True}).status_code == 200
    names, dtypes, shapes = trainer.do("announce").values()
    info = {"names": names, "dtype_names": dtypes, "shapes": shapes}
    with ThreadPoolExecutor() as threads:
        part = threads.submit(server.post, "/update_weights", {"update_info": info})
        time.sleep(0.2)
        assert said(server) == BY_ONE, "steps go on while the trainer is waited for"
        assert server.get("/health").status_code == 200
        again = server.post("/update_weights", {"update_info": info})
        assert (again.status_code, part.done()) == (400, False)
        trainer.begin("broadcast", packed=2**30)
        assert part.result().json() == {"message": "Weights updated"}
        trainer.end()
    assert (said(server), version(server)) == (BY_ONE, "0"), "it is not finished"
    done = httpx.post(f"{server.url}/finish_weight_update")
    assert (done.status_code, done.json()["message"]) == (200, "Weight update finished")
    assert said(server) == BY_TWO
    assert server.post("/finish_weight_update", {}).status_code == 400
    trainer.do("part")


def test_prime_rls_update_from_a_directory(
    server: ServerProcess, model: Path, by_twos, tmp_path: Path
) -> None:
    save_file(by_twos, tmp_path / "model.safetensors")
    for _ in range(2):
        answer = server.post("/update_weights", {"weight_dir": str(tmp_path)})
        assert (answer.status_code, answer.json()["status"]) == (200, "ok")
    assert said(server) == BY_TWO
    assert server.post("/update_weight_version", {"new_version": "step-8"}).json()["success"]
    assert version(server) == "step-8"
    (tmp_path / "model.safetensors").write_bytes(b"no such thing")
    assert server.post("/update_weights", {"weight_dir": str(tmp_path)}).status_code == 400
    assert (said(server), version(server)) == (BY_TWO, "step-8")


class Hostile:
    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> Any:
        return Path.touch, (self.file,)


def text_of(data: bytes) -> str:
    return base64.b64encode(data).decode()


def test_what_is_malformed_or_hostile_changes_nothing(
    server: ServerProcess, trainer: Trainer, by_twos, tmp_path: Path
) -> None:
    good = base64.b64decode(trainer.do("serialize", kind="bytes", names=[HEAD]))
    tensors = [
        pickle.dumps(Hostile(tmp_path / "touched")),
        good[: len(good) // 2],
        pickle.dumps([("no.such.weight", torch.zeros(3))]),
        pickle.dumps([(HEAD, torch.zeros(3))]),
        pickle.dumps([(HEAD, torch.zeros(by_twos[HEAD].shape, dtype=torch.int64))]),
        pickle.dumps([(HEAD, by_twos[HEAD]), (HEAD, by_twos[HEAD])]),
        pickle.dumps([(HEAD, by_twos[HEAD]), ("no.such.weight", torch.zeros(3))]),
        pickle.dumps([(HEAD, by_twos[HEAD] / 0)]),
    ]
    calls: list[tuple[str, dict[str, Any]]] = [
        *(("/update_weights_from_tensor", {"serialized_named_tensors": [text_of(each)]}) for each in tensors),
        ("/update_weights_from_tensor", {"serialized_named_tensors": ["%%%"]}),
        ("/update_weights_from_tensor", {"serialized_named_tensors": []}),
        (
            "/update_weights_from_tensor",
            {"serialized_named_tensors": [text_of(good)], "load_format": "os.system"},
        ),
        ("/update_weights_from_tensor", {"serialized_named_tensors": [text_of(good)], "other": 1}),
        ("/update_weights_from_disk", {"model_path": str(tmp_path)}),
        ("/update_weights_from_disk", {"model_path": str(tmp_path), "load_format": "pt"}),
        ("/update_weights_from_distributed", {"names": [], "dtypes": [], "shapes": []}),
        ("/init_weights_update_group", {"master_address": "127.0.0.1", "master_port": 0, "rank_offset": 1}),
        (
            "/init_weights_update_group",
            {"master_address": "127.0.0.1", "master_port": 9, "rank_offset": 1, "world_size": 2},
        ),
        ("/init_weight_transfer_engine", {"init_info": {"backend": "nccl"}}),
        ("/update_weights", {}),
        ("/update_weights", {"update_info": {"names": 1}}),
        ("/update_weight_version", {"new_version": 3}),
        ("/start_draft_weight_update", {}),
        ("/get_weights_by_name", {"name": "no.such.weight"}),
        ("/weights_checker", {"action": "break"}),
        ("/weights_checker", {"": 1}),
        ("/collective_rpc", {"method": "check_health", "args": [2**70]}),
        ("/get_weights_by_name", {"name": HEAD, "truncate_size": 2**70}),
        ("/weights_checker", {"body": 1}),
        ("/collective_rpc", {"method": "_link"}),
        ("/collective_rpc", {"method": "no_such_method"}),
        ("/collective_rpc", {"method": "add_lora", "args": [1]}),
        ("/collective_rpc", {"method": "add_lora"}),
    ]
    for path, body in calls:
        answer = server.post(path, body)
        assert answer.status_code == 400, (path, body, answer.text)
        assert answer.json()["error"]["message"], path
    assert not (tmp_path / "touched").exists()
    cut = httpx.post(
        f"{server.url}/update_weights_from_tensor",
        content=b'{"serialized_named_tensors": ["abc',
        headers={"Content-Type": "application/json"},
    )
    assert cut.status_code == 400
    assert (said(server), version(server)) == (BY_ONE, "0")


def test_what_checkpoint_engine_puts_into_its_buffer(
    server: ServerProcess, trainer: Trainer, by_twos, tmp_path: Path
) -> None:
    address = f"ipc://{tmp_path}/buffer"
    body = {"zmq_handles": {"GPU-of-somebody-else": "ipc://nowhere", "cpu": address}, "weight_version": "9"}
    largest = max(weight.nbytes for weight in by_twos.values())
    trainer.begin("lend_buffer", address=address, size=largest, names=list(by_twos))
    answer = server.post("/update_weights_from_ipc", body)
    assert answer.json()["success"], answer.text
    assert trainer.end() == ["", "", ""]
    assert (said(server), version(server)) == (BY_TWO, "9")
    # Of several fillings it stops at the first that is refused; behind the last it asks no more.
    for names in (list(by_twos), [HEAD]):
        for shift, why in ((2 * largest, "outside its bucket of"), (-(2**40), "at least 0")):
            trainer.begin("lend_buffer", address=address, size=largest, names=names, shift=shift)
            answer = server.post("/update_weights_from_ipc", body)
            assert answer.status_code == 400, answer.text
            assert why in answer.text
            assert why in trainer.end()[0]
    for handles in ({"GPU-1": address}, {"cpu": "tcp://127.0.0.1:1"}):
        answer = server.post("/update_weights_from_ipc", {"zmq_handles": handles})
        assert answer.status_code == 400
    assert (said(server), version(server)) == (BY_TWO, "9")


def test_weights_can_be_looked_at(server: ServerProcess, by_twos, trainer: Trainer) -> None:
    norm = server.post("/get_weights_by_name", {"name": "model.norm.weight", "truncate_size": 2}).json()
    assert norm == by_twos["model.norm.weight"][:2].tolist()
    assert server.post("/weights_checker", {"action": "snapshot"}).json()["success"]
    before = server.post("/weights_checker", {}).json()
    assert before["ranks"][0]["checksums"].keys() == by_twos.keys()
    body = {"serialized_named_tensors": [trainer.do("serialize", kind="list", names=[HEAD])]}
    server.post("/update_weights_from_tensor", body)
    differs = server.post("/weights_checker", {"action": "compare"})
    assert (differs.status_code, differs.json()["success"]) == (400, False)
    assert HEAD in differs.json()["message"]
    after = server.get("/weights_checker").json()
    assert after["per_engine_checksum"] != before["per_engine_checksum"]


def test_an_update_ends_requests_if_it_is_asked_to(server: ServerProcess, model: Path) -> None:
    body = {"text": "a", "sampling_params": {"temperature": 0, "max_new_tokens": 200}, "stream": True}
    ended = []

    def stream() -> None:
        with httpx.stream("POST", f"{server.url}/generate", json=body) as answer:
            lines = [line for line in answer.iter_lines() if line.startswith("data: {")]
            ended.append(lines[-1])

    thread = threading.Thread(target=stream)
    assert server.post("/pause_generation", {}).status_code == 200
    try:
        thread.start()
        while not server.engine_statistics()["waiting"]:
            time.sleep(0.02)
        update = {"model_path": str(model), "abort_all_requests": True}
        assert server.post("/update_weights_from_disk", update).json()["success"]
    finally:
        assert server.post("/continue_generation", {}).status_code == 200
    thread.join(20)
    assert '"abort"' in ended[0]


def test_trainers_are_administrators(model: Path) -> None:
    from ostinato.server.http.keys import ADMIN_PATHS, WEIGHT_PATHS

    assert WEIGHT_PATHS < ADMIN_PATHS
