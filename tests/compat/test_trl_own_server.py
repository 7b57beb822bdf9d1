"""TRL 1.10 as it comes from PyPI, whose server has a protocol of its own, against ours.

    python -m venv old && old/bin/pip install trl==1.10.0
    OSTINATO_OLD_TRL=old/lib/python3.11/site-packages pytest -m slow tests/compat/test_trl_own_server.py

TRL asks torch for the trainer's GPU; on a CPU two functions of torch tell it of one. All else is TRL's own:
calls, the meeting (over `ostinato.compat.vllm`, by gloo), weights one by one.
"""

import json
import os
from pathlib import Path

import pytest

from engine.trainer_process import free_port
from server.server_process import ServerProcess

from .test_trl import SCRIPT, python

OLD = os.environ.get("OSTINATO_OLD_TRL")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        OLD is None, reason="needs OSTINATO_OLD_TRL, the packages of an environment with TRL 1.10"
    ),
]

CLIENT = """
import types

torch.cuda.get_device_properties = lambda device: types.SimpleNamespace(uuid="42")
torch.cuda.current_device = lambda: "cpu"
from trl.generation.vllm_client import VLLMClient
from transformers import AutoModelForCausalLM

client = VLLMClient(base_url={url!r}, group_port={port}, connection_timeout=60)
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
    client.init_communicator(device="cpu")
    client.update_model_params(model)
    client.reset_prefix_cache()
    apart.append(differences(client.generate(prompts, **ask)))
    whole = [prompt + ids for prompt, ids in zip(prompts, before["completion_ids"][::2], strict=True)]
    lengths = [len(each) for each in prompts]
    scored = []
    for options in (dict(), dict(chunk_size=1), dict(use_binary=False)):
        known = client.get_sequence_logprobs(whole, lengths, top_logprobs=30, **options)
        own = model(torch.tensor([whole[0]])).logits[0].log_softmax(-1)
        at = lengths[0]
        best = own[at - 1].topk(30)
        assert known["logprob_token_ids"][0][0][:30] == best.indices.tolist()
        scored.append(float((best.values - torch.tensor(known["logprobs"][0][0][:30])).abs().max()))
        if options.get("use_binary", True):
            scored.append(abs(float(own[at - 1, whole[0][at]]) - known["actual_logprobs"][0][0][0]))
client.close_communicator()
found = dict(apart=apart, scored=scored, ids=before["prompt_ids"] == prompts, version=trl.__version__)
trainer = trl.GRPOTrainer(
    model={model!r}, reward_funcs=reward, processing_class=tokenizer,
    args=trl.GRPOConfig(
        **(common | dict(
            vllm_mode="server", vllm_server_base_url={url!r}, vllm_group_port={port}, temperature=0.8
        ))
    ),
    train_dataset=Dataset.from_list([dict(prompt=each) for each in PROMPTS * 4]),
)
trainer.train()
found["grpo"] = [
    entry["sampling/sampling_logp_difference/max"] for entry in trainer.state.log_history if "reward" in entry
]
print("found", json.dumps(found))
"""


def test_the_old_client_and_grpo_in_server_mode(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tmp_path / "model"
    model.mkdir()
    monkeypatch.setenv("VLLM_SERVER_DEV_MODE", "1")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(OLD), os.environ.get("PYTHONPATH", "")]))
    names = {"folder": str(Path(__file__).parents[2] / "examples"), "model": str(model)}
    made = python(SCRIPT.format(**names, body=""))
    assert made.returncode == 0, made.stderr[-3000:]
    options = ["--logprobs-mode", "processed_logprobs", "--max-logprobs", "-1", "--max-model-len", "64"]
    with ServerProcess(model, *options) as server:
        told = CLIENT.format(url=server.url, model=str(model), port=free_port())
        done = python(SCRIPT.format(**names, body="") + told)
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("found "))[6:])
    assert tuple(map(int, found["version"].split(".")[:2])) <= (1, 10), "newer ones are test_trl_server.py's"
    same, changed, synced = found["apart"]
    assert max(same, synced) < 1e-5 < 0.01 < changed
    assert max(found["scored"]) < 1e-5
    assert found["ids"]
    assert len(found["grpo"]) == 3
    assert max(found["grpo"]) < 1e-5
