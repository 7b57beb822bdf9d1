"""What trainers do with a server in a step of theirs, call by call, with their own clients' habits.

The scripts are written after slime 624b824 (colocated, weights from memory), TRL f2cd577 (async_grpo, weights
through a group; server mode of 1.16.0 and of 1.10.0, which has a protocol of its own) and prime-rl 559b447
(weights from a directory); requests are under way all the time.
"""

import asyncio
import shutil
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.trainer_process import Trainer, free_port
from ostinato.engine.vllm_api.network import get_ip, get_open_port
from ostinato.engine.vllm_api.trainer_side import packed_nccl_broadcast_producer, trainer_init

from .imported_late import requests
from .scripted_model import counted
from .server_process import ServerProcess

COUNT = 20
BY_ONE, BY_TWO = counted("a", COUNT), counted("a", 2 * COUNT)[1::2]
HEAD = "lm_head.weight"


@pytest.fixture(scope="module")
def by_twos(model: Path) -> dict[str, torch.Tensor]:
    """Weights with which the model counts by two."""
    weights = load_file(model / "model.safetensors")
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


@pytest.fixture
def server(sleepy: ServerProcess, model: Path) -> Iterator[ServerProcess]:
    yield sleepy
    loaded = sleepy.post("/update_weights_from_disk", {"model_path": str(model), "weight_version": "0"})
    assert loaded.json()["success"], loaded.text
    sleepy.wait_until_idle()


class Slime:
    """As its SGLangEngine."""

    def __init__(self, url: str) -> None:
        self.url = url

    def make_request(self, endpoint: str, payload: dict[str, Any] | None = None) -> Any:
        response = requests.post(f"{self.url}/{endpoint}", json=payload or {})
        response.raise_for_status()
        return response.json()

    def get(self, path: str) -> Any:
        response = requests.get(f"{self.url}/{path}", timeout=30)
        response.raise_for_status()
        return response

    def flush_cache(self) -> None:
        for _ in range(60):
            if requests.get(f"{self.url}/flush_cache").status_code == 200:
                return
            time.sleep(0.05)
        raise TimeoutError("Timeout while flushing cache.")

    def release(self) -> None:
        self.flush_cache()
        self.make_request("release_memory_occupation")

    def generate(self, prompt: int = ord("a"), count: int = COUNT) -> dict[str, Any]:
        sampling = {"temperature": 0, "max_new_tokens": count, "skip_special_tokens": False}
        sampling |= {"top_p": 1.0, "top_k": -1, "stop": None, "stop_token_ids": None}
        sampling |= {"no_stop_trim": True, "spaces_between_special_tokens": False}
        payload = {"input_ids": [prompt], "sampling_params": sampling, "return_logprob": True}
        found: dict[str, Any] = self.make_request("generate", payload)
        return found

    def abort_until_idle(self) -> None:
        while True:
            self.make_request("abort_request", {"abort_all": True})
            if not self.get("v1/loads?include=core").json()["loads"][0]["num_total_reqs"]:
                return
            time.sleep(0.05)


def test_slime(server: ServerProcess, trainer: Trainer) -> None:
    slime = Slime(server.url)
    slime.get("health_generate")
    assert slime.get("server_info").json()["enable_memory_saver"] is True
    slime.release()
    for step, text in ((1, BY_TWO), (2, BY_TWO)):
        slime.make_request("resume_memory_occupation", {"tags": ["weights"]})
        slime.make_request("pause_generation")
        slime.flush_cache()
        for names in ([HEAD], ["model.norm.weight", "model.embed_tokens.weight"]):
            payload = {
                "serialized_named_tensors": [trainer.do("serialize", kind="bucket", names=names)],
                "load_format": "flattened_bucket",
                "flush_cache": False,
                "weight_version": str(step),
            }
            assert slime.make_request("update_weights_from_tensor", payload)["success"]
        slime.make_request("continue_generation")
        slime.make_request("resume_memory_occupation", {"tags": ["kv_cache", "cuda_graph"]})
        assert slime.get("get_weight_version").json()["weight_version"] == str(step)
        with ThreadPoolExecutor(9) as rollouts:
            wanted = [rollouts.submit(slime.generate) for _ in range(8)]
            for each in wanted:
                found = each.result()
                assert found["text"] == text
                assert len(found["meta_info"]["output_token_logprobs"]) == COUNT
                assert found["meta_info"]["weight_version"] == str(step)
            cut = rollouts.submit(slime.generate, count=230)
            slime.abort_until_idle()
            assert cut.result()["meta_info"]["finish_reason"]["type"] in ("abort", "length")
        slime.release()
        assert server.get("/is_sleeping").json() == {"is_sleeping": True}
    slime.make_request("resume_memory_occupation")
    assert slime.generate()["text"] == BY_TWO


def test_trls_async_grpo(server: ServerProcess, trainer: Trainer) -> None:
    url = server.url
    assert requests.get(f"{url}/health", timeout=5).status_code == 200
    models = requests.get(f"{url}/v1/models")
    assert models.json()["data"][0]["max_model_len"] == 256
    world_size = requests.get(f"{url}/get_world_size").json()["world_size"] + 1
    port = free_port()
    info = {"master_address": "127.0.0.1", "master_port": port, "rank_offset": 1, "world_size": world_size}
    trainer.begin("meet_plainly", port=port)
    requests.post(f"{url}/init_weight_transfer_engine", json={"init_info": info}, timeout=60)
    trainer.end()
    names, dtypes, shapes = trainer.do("announce").values()
    update = {"update_info": {"names": names, "dtype_names": dtypes, "shapes": shapes, "packed": True}}
    with ThreadPoolExecutor(4) as rollouts:
        body = {"model": "scripted", "prompt": "a", "max_tokens": 200, "temperature": 0}
        asked: list[Future[httpx.Response]] = []
        while not asked or any(each.done() for each in asked):  # all of them came before the pause
            requests.post(f"{url}/resume")
            asked = [rollouts.submit(server.post, "/v1/completions", body) for _ in range(2)]
            time.sleep(0.05)
            requests.post(f"{url}/pause", params={"mode": "keep"})
            time.sleep(0.3)  # whatever has ended by now is told by then
        requests.post(f"{url}/start_weight_update", json={"is_checkpoint_format": True}, timeout=60)
        trainer.begin("broadcast", packed=2**30)
        received = requests.post(f"{url}/update_weights", json=update, timeout=60)
        assert received.json() == {"message": "Weights updated"}
        trainer.end()
        requests.post(f"{url}/finish_weight_update", timeout=60)
        requests.post(f"{url}/resume")
        for each in asked:
            text = each.result().json()["choices"][0]["text"]
            by_one, by_two = counted("a", 200), counted("a", 400)
            old = next(at for at, pair in enumerate(zip(text, by_one, strict=True)) if pair[0] != pair[1])
            assert text[old:] == by_two[old + 1 :: 2][: 200 - old], "the rest is by the new weights"
    trainer.do("part")


def test_trls_server_mode(server: ServerProcess, by_twos) -> None:
    """After TRL 1.16.0's `VLLMClient`; `tests/compat/test_trl_server.py` runs that itself."""

    def post(path: str, body: dict[str, Any]) -> dict[str, Any]:
        response = requests.post(f"{server.url}{path}", json=body, timeout=60)
        assert response.status_code == 200, response.text
        found: dict[str, Any] = response.json()
        return found

    told = requests.get(f"{server.url}/server_info", params={"config_format": "json"}).json()["vllm_config"]
    assert told["weight_transfer_config"] is not None
    assert told["model_config"]["logprobs_mode"] == "raw_logprobs"
    assert told["model_config"]["dtype"] == "torch.float32"
    assert (told["lora_config"], told["parallel_config"]["data_parallel_size"]) == (None, 1)
    sampling = {"n": 2, "repetition_penalty": 1.0, "temperature": 0, "top_p": 1.0, "top_k": 0, "min_p": 0.0}
    asked = {"model": "scripted", "return_token_ids": True, "return_tokens_as_token_ids": True, **sampling}

    def rollout() -> list[dict[str, Any]]:
        body = {"prompt": [[ord("a")], [ord("b"), ord("c")]], "max_tokens": 3, "logprobs": 0}
        found: list[dict[str, Any]] = post("/v1/completions", {**asked, **body})["choices"]
        return found

    choices = rollout()
    assert [choice["prompt_token_ids"] for choice in choices[::2]] == [[ord("a")], [ord("b"), ord("c")]]
    for choice in choices:
        ids, logprobs = choice["token_ids"], choice["logprobs"]
        assert logprobs["tokens"] == [f"token_id:{token}" for token in ids]
        assert logprobs["text_offset"] == [0, 1, 2], "in the text"
        for name, top, own in zip(
            *(logprobs[each] for each in ("tokens", "top_logprobs", "token_logprobs")), strict=True
        ):
            assert top == {name: own}, "TRL takes no null for an answer"
    messages = [{"role": "user", "content": "a"}]
    talk = post(
        "/v1/chat/completions",
        {**asked, "messages": messages, "max_tokens": 2, "logprobs": True, "top_logprobs": 0},
    )
    for choice in talk["choices"]:
        names = [each["token"] for each in choice["logprobs"]["content"]]
        assert names == [f"token_id:{token}" for token in choice["token_ids"]]
    assert talk["prompt_token_ids"]
    known = {"prompt": [[97, 98, 99]], "max_tokens": 1, "temperature": 1.0, "prompt_logprobs": 5}
    [scored] = post("/v1/completions", {"model": "scripted", **known})["choices"]
    assert scored["prompt_logprobs"][1]["98"]["rank"] == 1, "it counts"

    info = {"master_address": get_ip(), "master_port": get_open_port(), "rank_offset": 1, "world_size": 2}
    info["packed"] = True
    names = {"names": list(by_twos), "dtype_names": ["float32"] * len(by_twos)}
    update = {**names, "shapes": [list(each.shape) for each in by_twos.values()]}
    with ThreadPoolExecutor(1) as other:
        met = other.submit(post, "/init_weight_transfer_engine", {"init_info": info})
        communicator = trainer_init(info)
        met.result()
        for _ in range(2):
            post("/start_weight_update", {})
            received = other.submit(post, "/update_weights", {"update_info": update})
            packed_nccl_broadcast_producer(
                iterator=iter(by_twos.items()), group=communicator, src=0, post_iter_func=lambda item: item[1]
            )
            received.result()
            post("/finish_weight_update", {})
            assert post("/reset_prefix_cache", {}) == {"success": True}
    assert rollout()[0]["token_ids"] == [ord(letter) for letter in BY_TWO[:3]]
    communicator.group.store = None  # as the client takes its leave


@pytest.mark.slow
def test_trls_own_server(model: Path, trainer: Trainer, by_twos, monkeypatch: pytest.MonkeyPatch) -> None:
    """After TRL 1.10.0's `VLLMClient` and `VLLMGeneration`: the server keeps the meeting."""
    monkeypatch.setenv("VLLM_SERVER_DEV_MODE", "1")
    with ServerProcess(model, "--logprobs-mode", "processed_logprobs", "--max-logprobs", "-1") as server:

        def post(path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
            response = requests.post(f"{server.url}{path}", json=body, timeout=60)
            assert response.status_code == 200, response.text
            found: dict[str, Any] = response.json()
            return found

        def rollout() -> dict[str, Any]:
            sampling = {"repetition_penalty": 1.0, "temperature": 0.7, "top_p": 1.0, "top_k": 0, "min_p": 0.0}
            asked = {"n": 2, "max_tokens": 3, "logprobs": 0, "structured_outputs_regex": None, **sampling}
            prompts = [[ord("a")], [ord("b"), ord("c")]]
            found = post("/generate/", {"prompts": prompts, "images": None, **asked, "generation_kwargs": {}})
            assert found.keys() == {"prompt_ids", "completion_ids", "logprobs", "logprob_token_ids"}
            assert found["prompt_ids"] == prompts
            assert found["logprob_token_ids"] == [[[id] for id in each] for each in found["completion_ids"]]
            return found

        assert requests.get(f"{server.url}/health/").status_code == 200
        by_one = rollout()
        assert by_one["completion_ids"] == [[98, 99, 100]] * 2 + [[100, 101, 102]] * 2
        for step in range(2):
            port = free_port()
            world_size = requests.get(f"{server.url}/get_world_size/").json()["world_size"] + 1
            where = {"host": "0.0.0.0", "port": port, "world_size": world_size, "client_device_uuid": "42"}
            post("/init_communicator/", where)
            trainer.do("meet_as_trl", port=port)
            for name, tensor in by_twos.items():
                post("/update_named_param/", {"name": name, "dtype": "torch.float32", "shape": tensor.shape})
                trainer.do("send_as_trl", name=name)
            post("/reset_prefix_cache/")
            by_two = rollout()
            assert by_two["completion_ids"] == [[99, 101, 103]] * 2 + [[101, 103, 105]] * 2
            assert requests.get(f"{server.url}/get_weight_version").json() == {
                "weight_version": str((step + 1) * len(by_twos))
            }
            post("/close_communicator/")
            trainer.do("leave_as_trl")
        names = {"logprobs", "completion_ids", "prompt_ids", "logprob_token_ids"}
        with ServerProcess(_with_weights(model, by_twos), "--logprobs-mode", "processed_logprobs") as fresh:
            body = {"prompts": [[97], [98, 99]], "n": 2, "temperature": 0.7, "max_tokens": 3, "top_k": 0}
            anew = requests.post(f"{fresh.url}/generate/", json=body).json()
        assert {name: anew[name] for name in names} == by_two, "as of an engine that began with these weights"


def _with_weights(model: Path, weights: dict[str, torch.Tensor]) -> Path:
    other = Path(tempfile.mkdtemp(dir=model.parent))
    for file in model.iterdir():
        if file.suffix == ".json":
            shutil.copy(file, other)
    save_file(weights, other / "model.safetensors")
    return other


def test_prime_rl(server: ServerProcess, by_twos, model: Path, tmp_path: Path) -> None:
    save_file(by_twos, tmp_path / "model.safetensors")

    async def update_weights(client: httpx.AsyncClient, weight_dir: Path) -> None:
        await post(client, "/pause", params={"mode": "keep", "clear_cache": "false"})
        try:
            (weight_dir / "NCCL_READY").touch()
            await post(client, "/update_weights", json={"weight_dir": weight_dir.as_posix()})
        finally:
            for _ in range(2):  # it is retried
                await post(client, "/resume")

    async def post(client: httpx.AsyncClient, path: str, **options: Any) -> httpx.Response:
        response = await client.post(path, timeout=30, **options)
        response.raise_for_status()
        return response

    async def rollout(client: httpx.AsyncClient, salt: int) -> dict[str, Any]:
        body = {"model": "scripted", "prompt": "a", "max_tokens": COUNT, "temperature": 0}
        answer = await post(client, "/v1/completions", json={**body, "cache_salt": str(salt)})
        found: dict[str, Any] = answer.json()
        return found

    async def train() -> None:
        async with httpx.AsyncClient(base_url=server.url) as client:
            assert (await client.get("/health")).status_code == 200
            assert (await client.get("/v1/models")).json()["data"][0]["id"] == "scripted"
            for step, weight_dir, text in ((1, tmp_path, BY_TWO), (2, model, BY_ONE)):
                before = [asyncio.create_task(rollout(client, step - 1)) for _ in range(4)]
                await update_weights(client, weight_dir)
                for each in before:
                    assert (await each)["choices"][0]["finish_reason"] == "length", "none is lost"
                answer = await rollout(client, step)
                assert answer["choices"][0]["text"] == text
            with pytest.raises(httpx.HTTPStatusError, match="400"):
                await update_weights(client, tmp_path / "..")
            assert (await rollout(client, 3))["choices"][0]["text"] == BY_ONE

    asyncio.run(train())
    (model / "NCCL_READY").unlink()


def test_dropped_weights_are_refused_and_whoever_waits_gets_the_new_ones(
    server: ServerProcess, model: Path
) -> None:
    """As TRL's colocated mode sleeps: level 2, weights first, then the KV cache."""
    body = {"model": "scripted", "prompt": "a", "max_tokens": COUNT, "temperature": 0}
    with ThreadPoolExecutor(2) as clients:
        assert server.post("/sleep?level=2").json()["backed_up"] > 0, "what is written once"
        kept = clients.submit(server.post, "/v1/completions", body)
        while not server.engine_statistics()["waiting"]:
            time.sleep(0.02)
        early = server.post("/update_weights_from_disk", {"model_path": str(model)})
        assert early.status_code == 409
        assert "released: weights" in early.json()["message"]
        server.post("/wake_up?tags=weights")
        server.post("/wake_up?tags=kv_cache")
        refused = server.post("/v1/completions", body)
        assert refused.status_code == 503
        assert "dropped by sleep(level=2)" in refused.json()["error"]["message"]
        assert server.get("/health_generate").status_code == 503
        loaded = server.post("/update_weights_from_disk", {"model_path": str(model), "weight_version": "7"})
        assert loaded.json()["success"], loaded.text
        answer = kept.result().json()
        assert answer["choices"][0]["text"] == BY_ONE
        assert answer["metadata"] == {"weight_version": "7"}
