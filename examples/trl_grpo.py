"""TRL's GRPOTrainer from PyPI, with Ostinato in place of vLLM.

    pip install trl                                          # no vLLM
    python examples/trl_grpo.py                              a tiny model, on a CPU in half a minute
    python examples/trl_grpo.py --compare --seeds 0 1 2 3 --json trl.json --picture trl.png
    python examples/trl_grpo.py --device cuda --sleep --model Qwen/Qwen3-0.6B --dtype bfloat16

It takes only the first import below and `use_vllm=True, vllm_mode="colocate"`. Anyone can verify the reward:
the share of an answer's letters that come before n in the alphabet. `--compare` also trains the same models
with TRL's own generation, and once more with other draws, which shows how much two runs differ anyway.
"""

# isort: off
import argparse
import gc
import json
import logging
import tempfile
import time
from pathlib import Path
from typing import Any

import ostinato.compat.vllm  # noqa: F401  before trl, which looks for vLLM when it is imported

import torch
from datasets import Dataset
from transformers import AutoTokenizer
from transformers.utils import logging as transformers_logging
from trl import GRPOConfig, GRPOTrainer

from ostinato import LLM, SamplingParams
from ostinato.tools.machine import machine
# isort: on

LETTERS = "abcdefghijklmnopqrstuvwxyz "
PROMPTS = ("hello", "good day", "what is it", "tell me more", "and then", "why", "go on", "so it is")
SHAPES = {
    "tiny": {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2},
    "small": {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 8},
}
KINDS = ("ostinato", "own", "own again")
"""The generator: Ostinato; TRL itself, with transformers; the same with another seed for its draws."""


def make_model(folder: Path, shape: str, seed: int) -> None:
    """Random weights and a tokenizer of letters, as a checkpoint."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    vocabulary = {byte_level.pre_tokenize_str(letter)[0][0]: at for at, letter in enumerate(LETTERS)}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer, tokenizer.decoder = byte_level, decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in ("<end>", "<pad>")])
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>", pad_token="<pad>")
    wrapped.save_pretrained(folder)
    config = Qwen3Config(
        **SHAPES[shape],
        vocab_size=32,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=SHAPES[shape]["hidden_size"] // 4,
        max_position_embeddings=256,
        tie_word_embeddings=False,
        eos_token_id=wrapped.eos_token_id,
        pad_token_id=wrapped.pad_token_id,
        bos_token_id=None,
    )
    torch.manual_seed(seed)
    Qwen3ForCausalLM(config).save_pretrained(folder)


def reward(completions: list[str], **_: Any) -> list[float]:
    """The share of letters before n."""
    return [sum("a" <= letter <= "m" for letter in text) / max(1, len(text)) for text in completions]


class Engine:
    """Ostinato inside a trainer, and what its graphs have done."""

    def __init__(self, llm: LLM) -> None:
        self.llm = llm
        self._at_start = self._graphs()

    def draw_aside(self, count: int) -> None:
        """Skip this many request seeds. TRL starts each engine with the same seed, so compared runs would all
        draw the same."""
        for name in self.llm.enqueue([{"prompt_token_ids": [0]}] * count, SamplingParams(max_tokens=1)):
            self.llm.engine.abort(name)
        self.llm.wait_for_completion(use_tqdm=False)

    def _graphs(self) -> set[int]:
        core = self.llm.engine.core
        runners = [core.runner.graphs, *core.sampler.graphs.values()]
        return {id(graph) for runner in runners for graph in runner.graphs.values()}

    def describe(self) -> dict[str, Any]:
        """Call this when the training is over."""
        forward, sampling = self.llm.graph_report(), self.llm.sampling_report()
        assert sampling is not None
        return {
            "graphs": len(self._at_start),
            "captured_while_training": len(self._graphs() - self._at_start),
            "forward_replays": forward.replays,
            "sampling_replays": sampling.replays,
            "eager_steps": {**forward.eager_steps, **sampling.eager_steps},
            "weight_updates": int(self.llm.weight_version),
        }


def settings(arguments: argparse.Namespace, kind: str, seed: int, folder: str) -> GRPOConfig:
    """TRL's trainer, identical except for the generator."""
    engine = {
        "use_vllm": True,
        "vllm_mode": "colocate",
        "vllm_enable_sleep_mode": arguments.sleep,
        "vllm_max_model_length": 128,
        "vllm_gpu_memory_utilization": 0.3,
    }
    return GRPOConfig(
        output_dir=folder,
        seed=seed + (1000 if kind == "own again" else 0),
        data_seed=seed,
        max_steps=arguments.steps,
        per_device_train_batch_size=arguments.batch,
        num_generations=8,
        max_completion_length=16,
        temperature=arguments.temperature,
        learning_rate=arguments.rate,
        lr_scheduler_type="constant",
        beta=0.0,
        use_cpu=arguments.device == "cpu",
        bf16=arguments.dtype == "bfloat16",
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        model_init_kwargs={"dtype": arguments.dtype},
        **(engine if kind == "ostinato" else {}),
    )


def train(arguments: argparse.Namespace, kind: str, seed: int) -> dict[str, Any]:
    """One run; its rewards step by step, and what shows that the engine had the trainer's weights."""
    with tempfile.TemporaryDirectory() as folder:
        model = arguments.model or folder
        if arguments.model is None:
            make_model(Path(folder), arguments.shape, seed)
        tokenizer = AutoTokenizer.from_pretrained(model)
        began = time.perf_counter()
        trainer = GRPOTrainer(
            model=model,
            reward_funcs=reward,
            args=settings(arguments, kind, seed, folder),
            train_dataset=Dataset.from_list([{"prompt": prompt} for prompt in PROMPTS * 8]),
            processing_class=tokenizer,
        )
        engine = Engine(trainer.vllm_generation.llm) if kind == "ostinato" else None
        if engine is not None and seed:
            engine.draw_aside(seed * arguments.steps * arguments.batch)
        started = time.perf_counter()
        trainer.train()
        ended = time.perf_counter()
        logged = [entry for entry in trainer.state.log_history if "reward" in entry]
        found: dict[str, Any] = {
            "kind": kind,
            "seed": seed,
            "start_seconds": started - began,
            "seconds": ended - started,
            "rewards": [entry["reward"] for entry in logged],
        }
        if engine is not None:
            differences = [entry["sampling/sampling_logp_difference/max"] for entry in logged]
            found |= {"logprob_differences": differences, "engine": engine.describe()}
            engine.llm.close()
        del trainer, engine
        gc.collect()
    return found


def last(run: dict[str, Any]) -> float:
    """Mean reward of the last third of the steps."""
    rewards = run["rewards"][-max(1, len(run["rewards"]) // 3) :]
    return float(sum(rewards) / len(rewards))


def compared(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Distance of the curves, compared with two runs of TRL's own generation."""
    curves = {kind: torch.tensor([run["rewards"] for run in runs if run["kind"] == kind]) for kind in KINDS}
    ends = {kind: torch.tensor([last(run) for run in runs if run["kind"] == kind]) for kind in KINDS}
    count = len(ends["own"])

    def between(one: str, other: str) -> dict[str, float]:
        apart = ends[one] - ends[other]
        return {
            "step_by_step": float((curves[one] - curves[other]).abs().mean()),
            "mean_curves": float((curves[one].mean(0) - curves[other].mean(0)).abs().mean()),
            "at_the_end": float(apart.mean()),
            "standard_error": float(apart.std() / count**0.5) if count > 1 else float("nan"),
        }

    return {
        "at_the_end": {kind: float(found.mean()) for kind, found in ends.items()},
        "ostinato and own": between("ostinato", "own"),
        "own again and own": between("own again", "own"),
    }


def draw(runs: list[dict[str, Any]], file: Path) -> None:
    """Rewards: every run thin, the mean of each kind thick."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 4.5))
    for kind, colour in zip(KINDS, ("tab:blue", "tab:orange", "tab:grey"), strict=True):
        curves = [run["rewards"] for run in runs if run["kind"] == kind]
        for curve in curves:
            axes.plot(curve, color=colour, alpha=0.2, linewidth=0.8)
        if curves:
            axes.plot(torch.tensor(curves).mean(0), color=colour, linewidth=2, label=kind)
    axes.set(xlabel="step", ylabel="mean reward", title="TRL's GRPOTrainer: who generates")
    axes.legend()
    figure.tight_layout()
    figure.savefig(file)


def main() -> None:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--shape", default="tiny", choices=list(SHAPES), help="shape of a model made here")
    parser.add_argument("--model", help="a directory or a hub name instead")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--batch", type=int, default=32, help="answers per step")
    parser.add_argument("--rate", type=float, default=2e-3)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--sleep", action="store_true", help="the engine sleeps while TRL trains")
    parser.add_argument("--compare", action="store_true", help="also train with TRL's own generation")
    parser.add_argument("--json", type=Path, help="write all figures here")
    parser.add_argument("--picture", type=Path, help="draw the rewards")
    arguments = parser.parse_args()
    logging.getLogger("ostinato").setLevel(logging.WARNING)
    transformers_logging.set_verbosity_error()
    if arguments.device == "cpu":
        torch.set_num_threads(1)  # tiny tensors gain nothing from more
    transformers_logging.disable_progress_bar()
    runs = []
    for seed in arguments.seeds:
        for kind in KINDS if arguments.compare else KINDS[:1]:
            run = train(arguments, kind, seed)
            runs.append(run)
            line = f"seed {seed}, {kind}: reward {run['rewards'][0]:.3f} at first, {last(run):.3f} in the end"
            print(f"{line}, {run['seconds']:.1f} s", flush=True)
            if "engine" in run:
                worst = max(run["logprob_differences"])
                print(f"  logprobs of TRL and of the engine differ by {worst:.1e} at most; {run['engine']}")
    described: dict[str, Any] = {
        "example": "trl_grpo",
        "machine": machine(),
        "versions": {name: version_of(name) for name in ("trl", "transformers", "torch", "datasets")},
        "settings": {name: value for name, value in vars(arguments).items() if not isinstance(value, Path)},
        "runs": runs,
    }
    if arguments.compare:
        described["compared"] = compared(runs)
        print(json.dumps(described["compared"], indent=1))
    if arguments.json:
        arguments.json.write_text(json.dumps(described, indent=1) + "\n")
    if arguments.picture:
        draw(runs, arguments.picture)


def version_of(name: str) -> str:
    """Of a distribution."""
    from importlib.metadata import version

    return version(name)


if __name__ == "__main__":
    main()
