"""Adapters over HTTP: named as models, loaded and unloaded as vLLM and SGLang do it."""

import base64
import json
import os
import pickle
import re
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import torch
from msgspec import structs
from safetensors.torch import load_file, save_file

from ostinato.server.config import ServerConfig
from ostinato.server.engine_client.client import EngineState
from ostinato.server.openai.errors import ApiError
from ostinato.server.service import Service
from ostinato.server.wire.messages import AdapterInfo, Ready

from .server_process import ServerProcess

SIZES = {
    "self_attn.q_proj": (64, 320),
    "self_attn.v_proj": (32, 320),
    "self_attn.o_proj": (320, 64),
    "mlp.up_proj": (16, 320),
    "mlp.gate_proj": (16, 320),
    "mlp.down_proj": (320, 16),
}


def write_adapter(directory: Path, seed: int, rank: int = 4) -> str:
    """One that changes what the scripted model says."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer, (out, inner) in SIZES.items():
        name = f"base_model.model.model.layers.0.{layer}"
        tensors[f"{name}.lora_A.weight"] = torch.randn(rank, inner, generator=generator)
        tensors[f"{name}.lora_B.weight"] = torch.randn(out, rank, generator=generator)
    directory.mkdir()
    save_file(tensors, directory / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": [
        layer.rpartition(".")[2] for layer in SIZES
    ]}  # fmt: skip
    (directory / "adapter_config.json").write_text(json.dumps(config))
    return str(directory)


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("adapters")
    return {name: write_adapter(folder / name, seed) for seed, name in enumerate("xyz")}


@pytest.fixture(scope="module")
def served(model: Path, adapters: dict[str, str]) -> Iterator[ServerProcess]:
    modules = [f"x={adapters['x']}", json.dumps({"name": "y", "path": adapters["y"]})]
    flags = ("--max-loras", "1", "--max-cpu-loras", "2", "--max-lora-rank", "8", "--restart-engine")
    with ServerProcess(model, *flags, "--lora-modules", *modules) as server:
        yield server


def text_of(server: ServerProcess, model: str | None, prompt: str = "ab", **more: Any) -> str:
    body = {"model": model, "prompt": prompt, "max_tokens": 6, "temperature": 0, **more}
    answer = server.post("/v1/completions", body)
    assert answer.status_code == 200, answer.text
    assert answer.json()["model"] == (model or "scripted")
    found: str = answer.json()["choices"][0]["text"]
    return found


def test_a_model_names_its_adapter(served: ServerProcess) -> None:
    base, x, y = (text_of(served, name) for name in (None, "x", "y"))
    assert base == "cdefgh"
    assert len({base, x, y}) == 3
    assert text_of(served, "scripted:x") == x
    assert text_of(served, "scripted") == base
    body = {"text": ["ab", "ab", "ab"], "sampling_params": {"temperature": 0, "max_new_tokens": 6}}
    found = served.post("/generate", {**body, "lora_path": ["x", None, "y"]}).json()
    assert [each["text"] for each in found] == [x, base, y]
    found = served.post("/generate", {**body, "text": "ab", "lora_path": "y"}).json()
    assert found["text"] == y
    messages = [{"role": "user", "content": "hi"}]
    chats = [
        served.post("/v1/chat/completions", {"model": name, "messages": messages, "max_tokens": 4}).json()
        for name in ("scripted", "x")
    ]
    assert [chat["model"] for chat in chats] == ["scripted", "x"]
    assert chats[0]["choices"][0]["message"]["content"] != chats[1]["choices"][0]["message"]["content"]
    vectors = [
        served.post("/v1/embeddings", {"model": name, "input": "ab"}).json()["data"][0]["embedding"]
        for name in ("scripted", "x", "y")
    ]
    assert vectors[0] != vectors[1] != vectors[2] != vectors[0]


def test_adapters_are_listed(served: ServerProcess, adapters: dict[str, str]) -> None:
    cards = served.get("/v1/models").json()["data"]
    assert [card["id"] for card in cards] == ["scripted", "x", "y"]
    assert cards[0]["parent"] is None
    assert cards[0]["root"] == served.get("/model_info").json()["model_path"]
    assert (cards[1]["parent"], cards[1]["root"]) == ("scripted", adapters["x"])
    assert served.get("/v1/models/x").json() == cards[1]
    assert served.get("/v1/models/z").status_code == 404
    metrics = served.metrics()
    [line] = [line for line in metrics.splitlines() if line.startswith("ostinato:lora_requests_info{")]
    assert 'max_lora="1"' in line
    assert "running_lora_adapters=" in line


def test_unknown_adapters_are_no_models(served: ServerProcess) -> None:
    for name in ("z", "scripted:z", "other:x", "x:y", ":x"):
        answer = served.post("/v1/completions", {"model": name, "prompt": "ab"})
        assert answer.status_code == 404, name
        assert answer.json()["error"]["code"] == "model_not_found"
    body = {"text": "ab", "lora_path": "z"}
    assert served.post("/generate", body).json()["error"]["param"] == "lora_path"
    body = {"text": ["ab"], "lora_path": ["x", "y"]}
    assert "2 of them for 1 prompts" in served.post("/generate", body).json()["error"]["message"]


def test_load_replace_and_unload_as_vllm(served: ServerProcess, adapters: dict[str, str]) -> None:
    x, y = text_of(served, "x"), text_of(served, "y")
    load = {"lora_name": "new", "lora_path": adapters["z"]}
    answer = served.post("/v1/load_lora_adapter", load)
    assert (answer.status_code, answer.text) == (200, "Success: LoRA adapter 'new' added successfully.")
    z = text_of(served, "new")
    assert z not in (x, y)
    again = served.post("/v1/load_lora_adapter", load)
    assert again.status_code == 400
    assert "loaded already: give load_inplace" in again.json()["error"]["message"]
    replaced = {"lora_name": "new", "lora_path": adapters["x"], "load_inplace": True}
    assert served.post("/v1/load_lora_adapter", replaced).status_code == 200
    assert text_of(served, "new") == x
    answer = served.post("/v1/unload_lora_adapter", {"lora_name": "new"})
    assert (answer.status_code, answer.text) == (200, "Success: LoRA adapter 'new' removed successfully.")
    assert served.post("/v1/completions", {"model": "new", "prompt": "ab"}).status_code == 404
    assert served.post("/v1/unload_lora_adapter", {"lora_name": "new"}).status_code == 404
    assert [text_of(served, name) for name in ("x", "y")] == [x, y]


def test_load_and_unload_as_sglang(served: ServerProcess, adapters: dict[str, str]) -> None:
    answer = served.post("/load_lora_adapter", {"lora_name": "s", "lora_path": adapters["z"]})
    assert answer.status_code == 200
    assert answer.json()["success"] is True
    assert set(answer.json()["loaded_adapters"]) == {"x", "y", "s"}
    assert answer.json()["loaded_adapters"]["s"]["lora_path"] == adapters["z"]
    again = served.post("/load_lora_adapter", {"lora_name": "s", "lora_path": adapters["z"]})
    assert (again.status_code, again.json()["success"]) == (400, False)
    assert "loaded already" in again.json()["error_message"]
    assert "unload it first" in again.json()["error_message"]
    answer = served.post("/unload_lora_adapter", {"lora_name": "s"})
    assert set(answer.json()["loaded_adapters"]) == {"x", "y"}
    assert served.post("/unload_lora_adapter", {"lora_name": "s"}).json()["success"] is False


def test_an_adapter_from_tensors(served: ServerProcess, adapters: dict[str, str]) -> None:
    tensors = load_file(Path(adapters["z"]) / "adapter_model.safetensors")
    config = json.loads((Path(adapters["z"]) / "adapter_config.json").read_text())
    served.post("/v1/load_lora_adapter", {"lora_name": "file", "lora_path": adapters["z"]})
    z = text_of(served, "file")
    served.post("/v1/unload_lora_adapter", {"lora_name": "file"})
    for given in (tensors, list(tensors.items())):
        pickled = base64.b64encode(pickle.dumps(given)).decode()
        body = {"lora_name": "given", "config_dict": config, "serialized_tensors": pickled}
        answer = served.post("/load_lora_adapter_from_tensors", body)
        assert answer.status_code == 200, answer.text
        assert answer.json()["loaded_adapters"]["given"]["lora_path"] == "__tensor__"
        assert text_of(served, "given") == z
        assert served.post("/load_lora_adapter_from_tensors", body).json()["success"] is False
        assert served.post("/unload_lora_adapter", {"lora_name": "given"}).json()["success"] is True
    hostile = base64.b64encode(b"cos\nsystem\n(S'true'\ntR.").decode()
    body = {"lora_name": "bad", "config_dict": config, "serialized_tensors": hostile}
    assert served.post("/load_lora_adapter_from_tensors", body).status_code == 400


def test_what_cannot_be_loaded_changes_nothing(
    served: ServerProcess, adapters: dict[str, str], tmp_path: Path
) -> None:
    def refused(body: dict[str, Any], text: str) -> None:
        answer = served.post("/v1/load_lora_adapter", body)
        assert answer.status_code == 400
        assert text in answer.json()["error"]["message"]

    refused({"lora_name": "n", "lora_path": "/nowhere"}, "no such directory")
    refused({"lora_name": "x", "lora_path": "/nowhere", "load_inplace": True}, "no such directory")
    refused({"lora_name": "scripted", "lora_path": adapters["x"]}, "the name of the model itself")
    refused({"lora_name": "n"}, "lora_path")
    refused({"lora_name": "n", "lora_path": write_adapter(tmp_path / "r", 1, rank=9)}, "raise max_lora_rank")
    assert [card["id"] for card in served.get("/v1/models").json()["data"]] == ["scripted", "x", "y"]


def test_an_adapter_in_use_is_not_unloaded_and_others_go_on(served: ServerProcess) -> None:
    x = text_of(served, "x")
    body = {"model": "x", "prompt": "ab", "max_tokens": 240, "ignore_eos": True, "temperature": 0}
    with httpx.stream("POST", f"{served.url}/v1/completions", json={**body, "stream": True}) as answer:
        lines = answer.iter_lines()
        text = next(line for line in lines if line)[6:]
        refused = served.post("/v1/unload_lora_adapter", {"lora_name": "x"})
        assert refused.status_code == 400
        assert "is in use by 1 unfinished request" in refused.json()["error"]["message"]
        # There is one slot: whoever has another adapter waits, whoever has none does not.
        assert text_of(served, None) == "cdefgh"
        events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    whole = json.loads(text)["choices"][0]["text"] + "".join(e["choices"][0]["text"] for e in events)
    assert whole.startswith(x)
    assert served.post("/v1/unload_lora_adapter", {"lora_name": "x"}).status_code == 200


def test_adapters_are_for_admins(model: Path, server: ServerProcess) -> None:
    from_page = {"Origin": "http://elsewhere.example"}
    answer = server.post("/v1/load_lora_adapter", {"lora_name": "n", "lora_path": "/x"}, headers=from_page)
    assert answer.status_code == 403
    answer = server.post("/v1/load_lora_adapter", {"lora_name": "n", "lora_path": "/x"})
    assert answer.status_code == 400
    assert "start the server with --enable-lora" in answer.json()["error"]["message"]


def test_an_adapter_unloaded_under_a_request_is_as_unknown_as_any(
    served: ServerProcess, adapters: dict[str, str]
) -> None:
    """The engine unloads before it reads requests that came while the adapter was there."""
    kinds: list[tuple[str, dict[str, Any]]] = [
        ("/v1/completions", {"model": "late", "prompt": "ab"}),
        ("/v1/completions", {"model": "scripted:late", "prompt": "ab", "stream": True}),
        ("/v1/chat/completions", {"model": "late", "messages": [{"role": "user", "content": "hi"}]}),
        ("/v1/embeddings", {"model": "late", "input": "ab"}),
        ("/generate", {"text": "ab", "lora_path": "late"}),
    ]
    served.post("/v1/load_lora_adapter", {"lora_name": "late", "lora_path": adapters["z"]})
    engine = served.engine_pid
    with ThreadPoolExecutor(1 + len(kinds)) as clients:
        os.kill(engine, signal.SIGSTOP)
        try:
            unloading = clients.submit(served.post, "/v1/unload_lora_adapter", {"lora_name": "late"})
            has_asked(served, "POST /v1/unload_lora_adapter", unloading)
            raced = [clients.submit(served.post, path, body) for path, body in kinds]
            has_asked(served, "all others", *raced)
        finally:
            os.kill(engine, signal.SIGCONT)
        assert unloading.result().status_code == 200
        found = [each.result() for each in raced]
    later = [served.post(path, body) for path, body in kinds]
    assert [each.status_code for each in later] == [404, 404, 404, 404, 400]
    assert [each.status_code for each in found] == [each.status_code for each in later]
    assert [each.json() for each in found] == [each.json() for each in later]


def has_asked(server: ServerProcess, what: str, *calls: Future[httpx.Response]) -> None:
    """Let the HTTP process get as far as it gets with these calls while its engine stands still."""
    for _ in range(10):
        assert server.get("/version").status_code == 200
        threading.Event().wait(0.02)
    assert not any(call.done() for call in calls), what


def test_adapters_of_an_engine_that_ended_are_loaded_again(
    served: ServerProcess, adapters: dict[str, str], tmp_path: Path
) -> None:
    """As they were: with what was loaded, replaced and unloaded since the start. The last test with it."""
    load = "/v1/load_lora_adapter"
    listed = {card["id"] for card in served.get("/v1/models").json()["data"]}
    for name in sorted(listed - {"scripted", "y"}):
        served.post("/v1/unload_lora_adapter", {"lora_name": name})
    own = {name: write_adapter(tmp_path / name, seed) for seed, name in enumerate(("kept", "gone", "other"))}
    for name, path in own.items():
        assert served.post(load, {"lora_name": name, "lora_path": path}).status_code == 200
    served.post(load, {"lora_name": "y", "lora_path": adapters["z"], "load_inplace": True})
    tensors = load_file(Path(adapters["z"]) / "adapter_model.safetensors")
    config = json.loads((Path(adapters["z"]) / "adapter_config.json").read_text())
    pickled = base64.b64encode(pickle.dumps(tensors)).decode()
    body = {"lora_name": "given", "config_dict": config, "serialized_tensors": pickled}
    assert served.post("/load_lora_adapter_from_tensors", body).status_code == 200
    before = {name: text_of(served, name) for name in ("kept", "y")}
    cards = {card["id"]: card for card in served.get("/v1/models").json()["data"]}
    shutil.rmtree(own["gone"])
    shutil.rmtree(own["other"])
    write_adapter(Path(own["other"]), 17)

    os.kill(served.engine_pid, signal.SIGKILL)
    end = time.monotonic() + 60
    for status in (503, 200):
        while served.get("/health").status_code != status:
            assert time.monotonic() < end
            time.sleep(0.02)
    now = {card["id"]: card for card in served.get("/v1/models").json()["data"]}
    assert set(now) == {"scripted", "kept", "y"}
    assert [now[name]["root"] for name in ("kept", "y")] == [own["kept"], adapters["z"]]
    assert {name: cards[name]["root"] for name in ("kept", "y")} == {
        name: now[name]["root"] for name in ("kept", "y")
    }
    assert {name: text_of(served, name) for name in before} == before
    why = {"gone": "no such directory", "other": "has changed", "given": "was given as tensors"}
    for name, reason in why.items():
        answer = served.post("/v1/completions", {"model": name, "prompt": "ab"})
        assert answer.status_code == 404
        assert reason in answer.json()["error"]["message"], name
        assert re.search(rf"adapter '{name}' is not there any more: .*{reason}", served.log), name
    assert served.post(load, {"lora_name": "other", "lora_path": own["other"]}).status_code == 200
    assert text_of(served, "other")
    # Their numbers are those they had, and a new one gets one that nobody has.
    listed_now = served.post("/unload_lora_adapter", {"lora_name": "other"}).json()["loaded_adapters"]
    assert len({each["lora_id"] for each in listed_now.values()}) == 2


def test_who_names_an_adapter_that_an_engine_could_not_load_again_is_told() -> None:
    service = Service(ServerConfig(), SimpleNamespace(state=EngineState.READY), "m")  # type: ignore[arg-type]
    x = AdapterInfo("x", 1, "p", False, "")
    first = Ready("d", "d", "X", 64, 4, 320, 320, False, True, [1], {}, "", adapters=[x])
    service.on_ready(first)
    assert service.model is not None
    service.model.adapters["z"] = AdapterInfo("z", 2, "q", False, "")
    assert [each.name for each in service.adapters] == ["x", "z"]
    for lost in ({"z": "it has changed"}, {}):
        service.on_ready(structs.replace(first, lost_adapters=lost))
        assert service.model.named("x").adapter == "x"
        for name in ("z", "m:z"):
            with pytest.raises(ApiError, match=r"could not be loaded again .*: it has changed"):
                service.model.named(name)
        with pytest.raises(ApiError, match=r"'z' is not loaded; .*: it has changed"):
            service.model.with_adapter("z", "lora_path")
        with pytest.raises(ApiError, match=r"'w' is not loaded$"):
            service.model.with_adapter("w", "lora_path")
