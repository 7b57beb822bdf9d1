"""The endpoints of `trl vllm-serve` (TRL up to 1.10), with a real server and a trainer in a third process.
Whatever is refused has changed nothing, and what a trainer was promised and did not get is not hidden."""

import base64
import os
import signal
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from engine.trainer_process import Trainer, free_port

from .scripted_model import counted
from .server_process import ServerProcess

HEAD, NORM = "lm_head.weight", "model.norm.weight"
FLAGS = ("--logprobs-mode", "processed_logprobs", "--max-logprobs", "-1")
ADMIN = {"Authorization": "Bearer secret"}
A, B = ord("a"), ord("b")


@pytest.fixture(scope="module")
def by_twos(model: Path) -> dict[str, torch.Tensor]:
    """Weights with which the model counts by two."""
    weights = load_file(model / "model.safetensors")
    table = (weights[HEAD] > weights[HEAD].max() / 2).float()
    return {**weights, HEAD: (table @ table) * weights[HEAD].max()}


@pytest.fixture(scope="module")
def weights_file(by_twos, tmp_path_factory: pytest.TempPathFactory) -> str:
    file = tmp_path_factory.mktemp("trainer") / "weights.pt"
    torch.save(by_twos, file)
    return str(file)


@pytest.fixture
def trainer(weights_file: str) -> Iterator[Trainer]:
    trainer = Trainer()
    trainer.do("load", file=weights_file)
    yield trainer
    trainer.close()


@pytest.fixture
def started(impatient: ServerProcess) -> ServerProcess:
    return impatient


@pytest.fixture
def trl(started: ServerProcess, model: Path) -> Iterator[ServerProcess]:
    yield started
    assert post(started, "/close_communicator/").status_code == 200
    loaded = post(started, "/update_weights_from_disk", {"model_path": str(model), "weight_version": "0"})
    assert loaded.json()["success"], loaded.text


def post(server: ServerProcess, path: str, body: Any = None) -> httpx.Response:
    return server.post(path, body, headers=ADMIN)


def generated(server: ServerProcess, **fields: Any) -> dict[str, Any]:
    body = {"prompts": [[A]], "temperature": 0, "max_tokens": 3, **fields}
    answer = server.post("/generate/", body)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def announced(weights: dict[str, torch.Tensor], name: str) -> dict[str, Any]:
    return {"name": name, "dtype": "torch.float32", "shape": list(weights[name].shape)}


def opened(server: ServerProcess, port: int, wrong: dict[str, Any] | None = None) -> httpx.Response:
    where = {"host": "0.0.0.0", "port": port, "world_size": 2, "client_device_uuid": "42"}
    return post(server, "/init_communicator/", where | (wrong or {}))


# -- rollouts --------------------------------------------------------------------------------------


def test_prompts_as_texts_and_as_ids_in_their_order(trl: ServerProcess) -> None:
    found = generated(trl, prompts=["a", "bc"], n=2)
    assert found["prompt_ids"] == [[A], [B, B + 1]], "one for each prompt"
    assert found["completion_ids"] == [[A + 1, A + 2, A + 3]] * 2 + [[B + 2, B + 3, B + 4]] * 2
    same = generated(trl, prompts=[[A], [B, B + 1]], n=2, images=[None, None])
    assert {**same, "logprobs": None} == {**found, "logprobs": None}
    assert np.allclose(same["logprobs"], found["logprobs"])


def test_more_prompts_than_other_endpoints_take(trl: ServerProcess) -> None:
    found = generated(trl, prompts=[[A], [B]] * 300, max_tokens=1, logprobs=None)
    assert found["completion_ids"] == [[A + 1], [B + 1]] * 300
    assert (found["logprobs"], found["logprob_token_ids"]) == (None, None)


def test_logprobs_are_of_what_is_sampled_and_likeliest_first(trl: ServerProcess) -> None:
    plain = generated(trl, temperature=1.0, logprobs=2, generation_kwargs={"logit_bias": {"120": 30.0}})
    assert all(len(entry) in (2, 3) for entry in plain["logprobs"][0])
    for entry in plain["logprobs"][0]:
        assert entry == sorted(entry, reverse=True)
    for token, known in zip(plain["completion_ids"][0], plain["logprob_token_ids"][0], strict=True):
        assert token in known
    cold, hot = (generated(trl, temperature=t, logprobs=-1, max_tokens=1) for t in (0.5, 2.0))
    for found in (cold, hot):
        [[entry]], [[ids]] = found["logprobs"], found["logprob_token_ids"]
        assert len(ids) == len(set(ids)) == 320
        assert np.exp(entry).sum() == pytest.approx(1, abs=1e-4), "all of the vocabulary"
    assert cold["logprobs"][0][0][0] > hot["logprobs"][0][0][0], "of the distribution that is sampled"


def test_further_parameters_go_before_the_fields(trl: ServerProcess) -> None:
    found = generated(trl, generation_kwargs={"n": 2, "max_tokens": 5, "stop_token_ids": [A + 2], "seed": 1})
    assert found["completion_ids"] == [[A + 1, A + 2]] * 2
    digits = generated(trl, structured_outputs_regex="[0-9]{2}", max_tokens=5)
    assert all(48 <= token < 58 for token in digits["completion_ids"][0][:2])
    chosen = generated(trl, generation_kwargs={"structured_outputs": {"choice": ["xyz"]}}, max_tokens=5)
    assert chosen["completion_ids"][0][:3] == [ord(letter) for letter in "xyz"]
    cut = generated(trl, prompts=["abcd"], truncate_prompt_tokens=2, logprobs=0)
    assert cut["prompt_ids"] == [[ord("c"), ord("d")]]


def test_an_answer_ends_where_the_context_does(trl: ServerProcess) -> None:
    found = generated(trl, prompts=[[A] * 250], max_tokens=4096, generation_kwargs={"ignore_eos": True})
    assert len(found["completion_ids"][0]) == 6


def test_conversations(trl: ServerProcess) -> None:
    said = {"role": "user", "content": "a"}
    body = {"messages": [[said], [said, {"role": "assistant", "content": "b"}, said]], "temperature": 0}
    found = trl.post("/chat/", {**body, "max_tokens": 8, "chat_template_kwargs": {}, "tools": None}).json()
    asked = {"messages": [said], "temperature": 0, "max_tokens": 8, "return_token_ids": True}
    known = trl.post("/v1/chat/completions", asked).json()
    assert found["prompt_ids"][0] == known["prompt_token_ids"]
    assert found["completion_ids"][0] == known["choices"][0]["token_ids"]
    assert len(found["prompt_ids"][1]) > len(found["prompt_ids"][0])
    tool = {"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object"}}}
    called = trl.post("/chat/", {**body, "tools": [tool]}).json()
    assert called["prompt_ids"][0] != found["prompt_ids"][0], "the template has written them"


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/generate/", {"prompts": []}, "prompts"),
        ("/generate/", {"prompts": [[]]}, "prompts"),
        ("/generate/", {"prompts": [[99999]]}, "prompts"),
        ("/generate/", {"prompts": [[A] * 300]}, "prompts"),
        ("/generate/", {"prompts": [[A]], "images": [["iVBORw0KGgo="]]}, "images"),
        ("/generate/", {"prompts": [[A]], "images": [None, None]}, "images"),
        ("/generate/", {"prompts": [[A]], "n": 0}, "n"),
        ("/generate/", {"prompts": [[A]], "max_tokens": 0}, "max_tokens"),
        ("/generate/", {"prompts": [[A]], "stream": True}, "stream"),
        ("/generate/", {"prompts": [[A]], "logprobs": 0, "beam": 2}, "beam"),
        ("/generate/", {"prompts": ["a"], "guided_decoding_regex": None}, None),
        ("/generate/", {"prompts": [[A]], "generation_kwargs": {"stream": True}}, "generation_kwargs.stream"),
        ("/generate/", {"prompts": [[A]], "generation_kwargs": {"beam": 2}}, "generation_kwargs.beam"),
        ("/generate/", {"prompts": [[A]], "generation_kwargs": {"top_p": 2}}, "generation_kwargs"),
        ("/generate/", {"prompts": [[A]], "truncate_prompt_tokens": None}, None),
        ("/generate/", {"text": "a", "sampling_params": {"max_new_tokens": 1}}, "text"),
        ("/chat/", {"messages": [{"role": "user", "content": "a"}]}, "messages"),
        ("/chat/", {"messages": [[{"role": "user", "content": [{"type": "image_pil"}]}]]}, "messages"),
        ("/chat/", {"messages": []}, "messages"),
        ("/get_sequence_logprobs/", {"sequences": [[A]], "prompt_lengths": [2]}, "prompt_lengths"),
        ("/get_sequence_logprobs/", {"sequences": [[A]], "prompt_lengths": []}, "prompt_lengths"),
        ("/get_sequence_logprobs/", {"sequences": [[A]], "prompt_lengths": [-1]}, "prompt_lengths"),
        ("/get_sequence_logprobs/", {"sequences": [[A] * 300], "prompt_lengths": [1]}, "sequences"),
    ],
)
def test_what_is_refused_by_name(started: ServerProcess, path: str, body: Any, param: str | None) -> None:
    answer = started.post(path, body)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param


def test_logprobs_of_another_distribution_are_refused(server: ServerProcess) -> None:
    """TRL would take them for those that it computes itself."""
    body = {"prompts": [[A]], "temperature": 0.5, "max_tokens": 2}
    answer = server.post("/generate/", body)
    assert answer.status_code == 400
    assert "--logprobs-mode processed_logprobs" in answer.json()["error"]["message"]
    assert server.post("/generate/", {**body, "logprobs": None}).json()["completion_ids"] == [[A + 1, A + 2]]


def test_a_slash_tells_trls_paths_from_sglangs_and_vllms(trl: ServerProcess) -> None:
    theirs = trl.post("/generate", {"text": "a", "sampling_params": {"temperature": 0, "max_new_tokens": 2}})
    assert theirs.json()["text"] == counted("a", 2)
    assert generated(trl)["completion_ids"]
    assert post(trl, "/reset_prefix_cache").json() == {"success": True}
    assert "status: True" in post(trl, "/reset_prefix_cache/").json()["message"]


# -- sequences of others ---------------------------------------------------------------------------


def test_logprobs_of_sequences(trl: ServerProcess) -> None:
    sequences, lengths, top = [[A, A + 1, A + 3, A + 4], [B, B + 1]], [1, 0], 3
    body = {"sequences": sequences, "prompt_lengths": lengths, "top_logprobs": top}
    plain = trl.post("/get_sequence_logprobs/", body).json()
    known = [
        trl.post("/v1/completions", {"prompt": ids, "max_tokens": 1, "prompt_logprobs": top}).json()
        for ids in sequences
    ]
    for number, length in enumerate(lengths):
        rows = known[number]["choices"][0]["prompt_logprobs"][length:]
        for at, row in enumerate(rows):
            wanted = sorted((row or {}).items(), key=lambda each: each[1]["rank"])
            assert plain["logprob_token_ids"][number][at] == [int(token) for token, _ in wanted]
            values = [entry["logprob"] for _, entry in wanted]
            assert plain["logprobs"][number][at] == pytest.approx(values, abs=1e-5)
    assert plain["logprobs"][1][0] == [], "nothing is before the first token"
    assert len(plain["logprobs"][0][1]) == top + 1, "one that is not among the likeliest comes beside them"

    packed = trl.post("/get_sequence_logprobs/", {**body, "response_format": "binary"}).json()
    assert packed["completion_lengths"] == [3, 2]
    assert packed["shape"] == [2, 3, top]

    def array(name: str, kind: type, width: int) -> Any:
        return np.frombuffer(base64.b64decode(packed[name]), kind).reshape(2, 3, width)

    values, ids = array("logprobs_b64", np.float32, top), array("token_ids_b64", np.int32, top)
    own, own_ids = (
        array("actual_logprobs_b64", np.float32, 1),
        array("actual_token_ids_b64", np.int32, 1),
    )
    assert values[0, 0] == pytest.approx(plain["logprobs"][0][0][:top], abs=1e-5)
    assert ids[0, 1].tolist() == plain["logprob_token_ids"][0][1][:top]
    assert own_ids[0, :, 0].tolist() == sequences[0][1:]
    assert own[0, 1, 0] == pytest.approx(plain["logprobs"][0][1][-1], abs=1e-5), "far from the likeliest"
    assert np.isneginf(values[1, 0]).all()
    assert np.isneginf(values[1, 2]).all(), "the shorter one ends before"
    assert np.isneginf(own[1, 0])


# -- weights ---------------------------------------------------------------------------------------


def test_weights_are_for_admins(trl: ServerProcess, by_twos) -> None:
    where = {"host": "127.0.0.1", "port": free_port(), "world_size": 2, "client_device_uuid": "42"}
    for slash in ("", "/"):
        for path, body in (
            ("/init_communicator", where),
            ("/update_named_param", announced(by_twos, HEAD)),
            ("/close_communicator", None),
            ("/reset_prefix_cache", None),
        ):
            assert trl.post(path + slash, body).status_code == 401, path + slash


def test_malformed_calls_change_nothing_and_the_next_ones_are_served(
    trl: ServerProcess, trainer: Trainer, by_twos
) -> None:
    right = announced(by_twos, HEAD)
    early = post(trl, "/update_named_param/", right)
    assert early.status_code == 400
    assert "/init_communicator/" in early.text
    port = free_port()
    assert opened(trl, port).json() == {"message": "Request received, initializing communicator"}
    trainer.do("meet_as_trl", port=port)
    with socket.create_server(("0.0.0.0", 0)) as taken:
        for wrong in (
            {"world_size": 3},
            {"world_size": 1},
            {"port": 0},
            {"port": 70000},
            {"port": "1"},
            {"host": ""},
            {"host": "192.0.2.1", "port": free_port()},
            {"host": "no.such.host.invalid", "port": free_port()},
            {"port": taken.getsockname()[1]},
        ):
            answer = opened(trl, port, wrong)
            assert answer.status_code == 400, (wrong, answer.text)
    for wrong in (
        {"name": "model.layers.7.mlp.up_proj.weight"},
        {"name": ""},
        {"shape": [320, 319]},
        {"shape": [-1, 320]},
        {"shape": "320"},
        {"dtype": "torch.int64"},
        {"dtype": "float33"},
        {"further": 1},
        {"name": "model.layers.0.self_attn.rotary_emb.inv_freq", "shape": [2**40]},
    ):
        answer = post(trl, "/update_named_param/", right | wrong)
        assert answer.status_code == 400, (wrong, answer.text)
    assert trl.get("/get_weight_version").json() == {"weight_version": "0"}
    assert generated(trl)["completion_ids"] == [[A + 1, A + 2, A + 3]]
    for name in by_twos:
        assert post(trl, "/update_named_param/", announced(by_twos, name)).status_code == 200
        trainer.do("send_as_trl", name=name)
    assert generated(trl)["completion_ids"] == [[A + 2, A + 4, A + 6]]


def test_a_closed_communicator(trl: ServerProcess, trainer: Trainer, by_twos) -> None:
    port = free_port()
    opened(trl, port)
    trainer.do("meet_as_trl", port=port)
    for _ in range(2):
        assert post(trl, "/close_communicator/").status_code == 200
    answer = post(trl, "/update_named_param/", announced(by_twos, HEAD))
    assert answer.status_code == 400
    assert "there is no communicator" in answer.text
    assert generated(trl)["completion_ids"] == [[A + 1, A + 2, A + 3]]
    with socket.create_server(("0.0.0.0", port)):
        pass  # nobody listens there any more


@pytest.mark.slow
def test_a_communicator_is_opened_in_the_place_of_an_earlier_one(
    trl: ServerProcess, trainer: Trainer, weights_file: str, by_twos
) -> None:
    """TRL's client has one port; a trainer that was killed comes again at the same."""
    port = free_port()
    assert opened(trl, port).status_code == 200
    assert opened(trl, port).status_code == 200, "nobody came to the first"
    trainer.do("meet_as_trl", port=port)
    post(trl, "/update_named_param/", announced(by_twos, NORM))
    trainer.do("send_as_trl", name=NORM)
    post(trl, "/update_named_param/", announced(by_twos, HEAD))
    trainer.close()  # before it has sent
    assert opened(trl, port).status_code == 200
    again = Trainer()
    again.do("load", file=weights_file)
    again.do("meet_as_trl", port=port)
    post(trl, "/update_named_param/", announced(by_twos, HEAD))
    again.do("send_as_trl", name=HEAD)
    assert generated(trl)["completion_ids"] == [[A + 2, A + 4, A + 6]]
    again.close()


def test_a_trainer_that_does_not_come_is_not_forgotten(trl: ServerProcess) -> None:
    assert opened(trl, free_port()).status_code == 200
    began = time.monotonic()
    answer = trl.post("/generate/", {"prompts": [[A]]})
    assert answer.status_code == 409
    assert time.monotonic() - began > 2, "it was waited for"
    assert "longer than 4 s" in answer.text
    assert trl.post("/generate/", {"prompts": [[A]]}).status_code == 409, "still"
    assert trl.post("/v1/completions", {"prompt": "a", "max_tokens": 1}).status_code == 200, "not of TRL"
    assert post(trl, "/close_communicator/").status_code == 200
    assert generated(trl)["completion_ids"] == [[A + 1, A + 2, A + 3]]


def test_a_weight_that_does_not_come_is_not_forgotten(trl: ServerProcess, trainer: Trainer, by_twos) -> None:
    port = free_port()
    opened(trl, port)
    trainer.do("meet_as_trl", port=port)
    assert post(trl, "/update_named_param/", announced(by_twos, HEAD)).status_code == 200
    trainer.close()
    messages = [{"role": "user", "content": "a"}]
    for path, body in (
        ("/reset_prefix_cache/", None),
        ("/generate/", {"prompts": [[A]]}),
        ("/chat/", {"messages": [messages]}),
        ("/get_sequence_logprobs/", {"sequences": [[A]], "prompt_lengths": [0]}),
        ("/update_named_param/", announced(by_twos, HEAD)),
    ):
        answer = post(trl, path, body)
        assert answer.status_code == 409, (path, answer.text)
        assert answer.json()["error"]["code"] == "weights_not_received"
    assert trl.get("/get_weight_version").json() == {"weight_version": "0"}


def test_no_rollout_is_of_two_kinds_of_weights(trl: ServerProcess, trainer: Trainer, by_twos) -> None:
    port = free_port()
    opened(trl, port)
    trainer.do("meet_as_trl", port=port)
    fields = {"max_tokens": 200, "logprobs": None, "generation_kwargs": {"ignore_eos": True}}
    alone = generated(trl, **fields)["completion_ids"]
    with ThreadPoolExecutor(2) as clients:
        under_way = clients.submit(generated, trl, **fields)
        while not trl.engine_statistics()["running"]:
            time.sleep(0.002)
        assert post(trl, "/update_named_param/", announced(by_twos, HEAD)).status_code == 200
        assert not under_way.done(), "the answer does not wait for it"
        later = clients.submit(generated, trl)
        trainer.do("send_as_trl", name=HEAD)
        assert under_way.result()["completion_ids"] == alone
        assert later.result()["completion_ids"] == [[A + 2, A + 4, A + 6]]


@pytest.mark.slow
def test_an_engine_that_is_started_again_has_lost_the_trainers_weights(
    model: Path, trainer: Trainer, by_twos
) -> None:
    with ServerProcess(model, *FLAGS, "--restart-engine", "--admin-key", "secret") as server:
        port = free_port()
        opened(server, port)
        trainer.do("meet_as_trl", port=port)
        post(server, "/update_named_param/", announced(by_twos, HEAD))
        trainer.do("send_as_trl", name=HEAD)
        assert generated(server)["completion_ids"] == [[A + 2, A + 4, A + 6]]
        os.kill(server.engine_pid, signal.SIGKILL)
        end = time.monotonic() + 60
        while (answer := server.post("/generate/", {"prompts": [[A]]})).status_code == 503:
            assert time.monotonic() < end
            time.sleep(0.1)
        assert answer.status_code == 409, answer.text
        assert "started again" in answer.text
        assert post(server, "/close_communicator/").status_code == 200
        assert generated(server)["completion_ids"] == [[A + 1, A + 2, A + 3]]
