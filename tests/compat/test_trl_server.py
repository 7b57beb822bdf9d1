"""TRL's client of a server, as it comes from PyPI, against ours. Needs `pip install trl`.

On a CPU TRL refuses to meet the server's engine for weights: there the meeting, one method, is put in its
place with the function that it calls on a GPU.
"""

import json
from pathlib import Path

import pytest

from server.server_process import ServerProcess

from .test_trl import SCRIPT, needs_trl, python

pytestmark = [pytest.mark.slow, needs_trl, pytest.mark.timeout(600)]

CLIENT = """
from concurrent.futures import ThreadPoolExecutor
from trl.generation import vllm_client
from trl.generation.vllm_client import VLLMClient
from transformers import AutoModelForCausalLM

client = VLLMClient(base_url={url!r}, connection_timeout=60)
try:
    client.init_communicator(device="cpu")
except NotImplementedError as error:
    assert "needs a CUDA device" in str(error)


def meet(client, device):
    info = dict(
        master_address="127.0.0.1", master_port=vllm_client_port(), rank_offset=1,
        world_size=client.get_world_size() + 1, packed=True,
    )
    with ThreadPoolExecutor(1) as other:
        met = other.submit(
            client._post, client.base_url + "/init_weight_transfer_engine", json=dict(init_info=info)
        )
        client.communicator = vllm_client.open_trainer_endpoint(info)
        met.result()


from vllm.utils.network_utils import get_open_port as vllm_client_port

model = AutoModelForCausalLM.from_pretrained({model!r})
prompts = tokenizer(["hello", "good day"])["input_ids"]


def differences(answer):
    worst = 0.0
    for prompt, ids, told in zip(prompts, *(answer[n][::2] for n in ("completion_ids", "logprobs"))):
        logits = model(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1] / 0.7
        own = logits.log_softmax(-1).gather(1, torch.tensor(ids)[:, None])
        worst = max(worst, float((own - torch.tensor(told)).abs().max()))
    return worst


with torch.no_grad():
    ask = dict(n=2, temperature=0.7, max_tokens=8, generation_kwargs=dict(ignore_eos=True))
    before = client.generate(prompts, **ask)
    apart = [differences(before)]
    for parameter in model.parameters():
        parameter += 0.2 * torch.randn_like(parameter)
    apart.append(differences(client.generate(prompts, **ask)))
    meet(client, "cpu")
    client.update_model_params(model)
    client.reset_prefix_cache()
    apart.append(differences(client.generate(prompts, **ask)))
    with client.weight_update():
        for name, parameter in model.named_parameters():
            client.update_named_param(name, parameter.data)
    apart.append(differences(client.generate(prompts, **ask)))
    whole = [prompt + ids for prompt, ids in zip(prompts, before["completion_ids"][::2], strict=True)]
    known = client.get_sequence_logprobs(whole, [len(each) for each in prompts], top_logprobs=30)
    own = model(torch.tensor([whole[0]])).logits[0].log_softmax(-1)
    at = len(prompts[0])
    scored = float(own[at - 1, whole[0][at]]) - known["actual_logprobs"][0][0][0]
client.close_communicator()
VLLMClient.init_communicator = meet
found = dict(
    apart=apart, scored=scored, ids=[before["prompt_ids"] == prompts, before["logprob_token_ids"][0][0]],
    first=before["completion_ids"][0][:1], info=client.get_server_info()["model_config"]["logprobs_mode"],
)
trainer = trl.GRPOTrainer(
    model={model!r}, reward_funcs=reward, processing_class=tokenizer,
    args=trl.GRPOConfig(**(common | dict(vllm_mode="server", vllm_server_base_url={url!r}, temperature=0.8))),
    train_dataset=Dataset.from_list([dict(prompt=each) for each in PROMPTS * 4]),
)
trainer.train()
found["grpo"] = [
    entry["sampling/sampling_logp_difference/max"] for entry in trainer.state.log_history if "reward" in entry
]
print("found", json.dumps(found))
"""


def test_trls_client_and_grpo_in_server_mode(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tmp_path / "model"
    model.mkdir()
    names = {"folder": str(Path(__file__).parents[2] / "examples"), "model": str(model)}
    made = python(SCRIPT.format(**names, body=""))
    assert made.returncode == 0, made.stderr[-3000:]
    monkeypatch.setenv("VLLM_SERVER_DEV_MODE", "1")
    options = ["--logprobs-mode", "processed_logprobs", "--max-logprobs", "-1", "--max-model-len", "64"]
    with ServerProcess(model, *options) as server:
        done = python(SCRIPT.format(**names, body="") + CLIENT.format(url=server.url, model=str(model)))
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("found "))[6:])
    same, changed, synced, synced_one_by_one = found["apart"]
    assert max(same, synced, synced_one_by_one) < 1e-5 < 0.01 < changed
    assert abs(found["scored"]) < 1e-5
    assert found["ids"] == [True, found["first"]]
    assert found["info"] == "processed_logprobs"
    assert len(found["grpo"]) == 3
    assert max(found["grpo"]) < 1e-5
