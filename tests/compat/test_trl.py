"""TRL from PyPI with Ostinato in vLLM's place; each script has a process. Needs `pip install trl`."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "trl_grpo.py"
needs_trl = pytest.mark.skipif(
    importlib.util.find_spec("trl") is None or importlib.util.find_spec("datasets") is None,
    reason="TRL is not installed: pip install trl",
)
pytestmark = [pytest.mark.slow, needs_trl, pytest.mark.timeout(600)]

SCRIPT = """
import json, sys
sys.path.insert(0, {folder!r})
import trl_grpo
from trl_grpo import PROMPTS, Dataset, Path, make_model, torch
from transformers import AutoTokenizer
import trl

torch.set_num_threads(1)
make_model(Path({model!r}), "tiny", 3)
tokenizer = AutoTokenizer.from_pretrained({model!r})
common = dict(
    output_dir={model!r} + "/out", per_device_train_batch_size=16, num_generations=8, max_steps=3,
    max_completion_length=12, learning_rate=2e-3, logging_steps=1, report_to=[], use_cpu=True, bf16=False,
    save_strategy="no", disable_tqdm=True, use_vllm=True, vllm_mode="colocate", vllm_max_model_length=64,
)
texts = []


def reward(completions, **_):
    texts.extend(completions)
    return trl_grpo.reward(completions)


def run(kind="GRPO", more={{}}, **options):
    del texts[:]
    trainer = getattr(trl, f"{{kind}}Trainer")(
        model={model!r}, reward_funcs=reward, args=getattr(trl, f"{{kind}}Config")(**(common | options)),
        train_dataset=Dataset.from_list([dict(prompt=each) for each in PROMPTS * 4]),
        processing_class=tokenizer, **more,
    )
    trainer.train()
    logged = [entry for entry in trainer.state.log_history if "reward" in entry]
    llm = trainer.vllm_generation.llm
    found = dict(
        steps=len(logged), texts=list(texts), eager=sum(llm.graph_report().eager_steps.values()),
        apart=[entry.get("sampling/sampling_logp_difference/max") for entry in logged],
    )
    llm.close()
    return found


{body}
"""


def python(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    return subprocess.run(
        [sys.executable, *([code] if arguments else ["-c", code]), *arguments],
        capture_output=True,
        text=True,
        env=environment,
        timeout=500,
    )


def script(tmp_path: Path, body: str) -> Any:
    """Run it; what it leaves in `found`."""
    model = tmp_path / "model"
    model.mkdir()
    code = SCRIPT.format(folder=str(EXAMPLE.parent), model=str(model), body=body)
    done = python(f"{code}\nprint('found', json.dumps(found))")
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(next(line for line in done.stdout.splitlines() if line.startswith("found "))[6:])


@pytest.mark.parametrize("sleep", [False, True])
def test_grpo_learns_as_with_its_own_generation(tmp_path: Path, sleep: bool) -> None:
    file = tmp_path / "trl.json"
    options = ["--compare", "--seeds", "0", "1", "--steps", "20", "--json", str(file)]
    done = python(str(EXAMPLE), *options, *(["--sleep"] if sleep else []))
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(file.read_text())
    ours = [run for run in found["runs"] if run["kind"] == "ostinato"]
    assert [len(run["rewards"]) for run in ours] == [20, 20]
    for run in ours:
        assert max(run["logprob_differences"]) < 1e-5, "the engine had the trainer's weights in every step"
        engine = run["engine"]
        assert engine["captured_while_training"] == 0
        assert engine["forward_replays"] >= 20 * 16
        assert not any(engine["eager_steps"].values())
        assert engine["weight_updates"] >= 20 * 25
    ends = found["compared"]["at_the_end"]
    assert all(end > 0.75 for end in ends.values()), "half of the letters count at first"
    # Runs with other draws differ by as much.
    apart = {name: each["step_by_step"] for name, each in found["compared"].items() if name != "at_the_end"}
    assert apart["ostinato and own"] < 2 * apart["own again and own"]


def test_logprobs_are_those_of_the_distribution_that_trl_trains(tmp_path: Path) -> None:
    body = "found = [run(temperature=each, vllm_enable_sleep_mode=True) for each in (0.7, 1.4)]"
    for found in script(tmp_path, body):
        assert found["steps"] == 3
        assert max(found["apart"]) < 1e-5
        assert not found["eager"]


def test_other_ways_to_train(tmp_path: Path) -> None:
    found = script(
        tmp_path,
        """
from peft import LoraConfig
adapter = dict(peft_config=LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))
found = dict(
    rloo=run("RLOO", vllm_enable_sleep_mode=True),
    adapter=run(more=adapter, learning_rate=0.05, vllm_enable_sleep_mode=True),
    accumulated=run(gradient_accumulation_steps=2, num_iterations=2),
    regex=run(vllm_structured_outputs_regex="[a-e]{4,8}"),
    choice=run(generation_kwargs=dict(structured_outputs=dict(choice=["abba", "cab"]))),
    stopped=run(generation_kwargs=dict(stop=["e"], include_stop_str_in_output=True)),
)
""",
    )
    assert all(each["steps"] >= 1 and not each["eager"] for each in found.values())
    assert max(found["adapter"]["apart"] + found["accumulated"]["apart"]) < 1e-5
    assert all(4 <= len(text) <= 8 and set(text) <= set("abcde") for text in found["regex"]["texts"])
    assert {*found["choice"]["texts"]} <= {"abba", "cab"}
    assert all("e" not in text[:-1] for text in found["stopped"]["texts"])


def test_what_cannot_be_had_is_refused_by_name(tmp_path: Path) -> None:
    found = script(
        tmp_path,
        """
found = {}
for name, value in dict(vllm_model_impl="transformers", vllm_max_model_length=8).items():
    try:
        run(**{name: value})
    except ValueError as error:
        found[name] = str(error)
""",
    )
    assert "model_impl can only be auto or vllm" in found["vllm_model_impl"]
    assert "prompt" in found["vllm_max_model_length"]
