"""Reinforcement learning on one device: rollout and training take turns, and nothing is captured twice.

    python examples/rl_colocated.py                          a tiny model on a CPU, a few minutes
    python examples/rl_colocated.py --device cuda --shape 0.6b --cycles 3 --seeds 0 --compare

A GRPO-like loop in one process. Each cycle: the engine's graphs generate several answers to every prompt; the
engine sleeps; a captured training step runs in the freed memory; the new weights are written over the
engine's; the engine wakes up, and its graphs answer with them. Anyone can verify the reward: the share of an
answer's tokens that are even. `--frozen` is the control: the same loop with a learning rate of 0.

With `--share-weights` the trainer's parameters are the engine's tensors. Needs transformers (for the
trainer's model), and matplotlib for `--picture`.
"""

import argparse
import gc
import json
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from ostinato import LLM, SamplingParams
from ostinato.graphs import GraphPool, TrainStep, graphed_train_step
from ostinato.memory import GraphMemory, MemorySaver
from ostinato.tools.machine import machine

TINY = {
    "vocab_size": 16,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
    "eos_token_id": None,
    "bos_token_id": None,
}
SMALL = {  # the shape of Qwen3-0.6B
    "vocab_size": 151936,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
    "eos_token_id": None,
    "bos_token_id": None,
}
SHAPES = {"tiny": TINY, "0.6b": SMALL}
CLIP = 0.2
CAUSAL = {"full_attention": None}
"""Ready-made attention masks: none. transformers inspects values to decide whether it needs a mask; during a
capture it cannot, and builds a full mask, which costs attention its fast kernel."""


@dataclass(frozen=True)
class Settings:
    """Sizes of a run."""

    prompts: int
    """Prompts per cycle."""
    answers: int
    """Answers per prompt: a group."""
    prompt_lengths: tuple[int, int]
    answer_length: int
    rows: int
    """Rows per micro-batch."""
    ladder: tuple[int, ...]
    rate: float
    num_tokens: int
    """Tokens that prompts are made of."""


SETTINGS = {
    "tiny": Settings(8, 8, (2, 6), 12, 16, (16, 20), 4e-3, 16),
    "0.6b": Settings(16, 8, (16, 128), 128, 16, (192, 256), 2e-5, 1024),
}


EVERY = 0.05
"""Seconds between two samples of memory use."""


@dataclass
class Memory:
    """Device memory of the process over time, by phase."""

    device: torch.device
    began: float = field(default_factory=time.perf_counter)
    samples: list[dict[str, Any]] = field(default_factory=list)
    phase: str = "start"

    def __post_init__(self) -> None:
        self._over, self._lock = threading.Event(), threading.Lock()
        self._watcher = threading.Thread(target=self._watch, daemon=True)
        self.note()
        self._watcher.start()

    def _watch(self) -> None:
        while not self._over.wait(EVERY):
            self.note()

    def note(self) -> int:
        """Take a sample now, in bytes. Of equal samples the first and the last are kept."""
        with self._lock:
            at, held = time.perf_counter() - self.began, self.held()
            sample = {"seconds": round(at, 3), "phase": self.phase, "bytes": held}
            if all(_same(sample, other) for other in self.samples[-2:]) and len(self.samples) > 1:
                self.samples.pop()
            self.samples.append(sample)
            return held

    def held(self) -> int:
        """Bytes."""
        if self.device.type == "cuda":
            free, total = torch.cuda.mem_get_info(self.device)
            return total - free
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return pages * 4096

    def close(self) -> None:
        """Stop sampling."""
        self._over.set()
        self._watcher.join()

    def most(self, *phases: str) -> int:
        """Peak bytes in these phases."""
        return max(sample["bytes"] for sample in self.samples if sample["phase"] in phases)


def _same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return (one["phase"], one["bytes"]) == (other["phase"], other["bytes"])


@dataclass
class Halves:
    """Memory of both halves side by side, and in turns; bytes beyond those of `start`."""

    start: int
    engine: int
    """Awake."""
    engine_asleep: int = 0
    training: int = 0
    """Peak, including parameters and optimizer state."""
    peak: int = 0
    """Peak of both, at any moment of any cycle."""

    @property
    def saved(self) -> int:
        """Saved by taking turns."""
        return self.engine + self.training - self.peak

    def described(self) -> dict[str, int]:
        """As JSON."""
        return {**{name: value for name, value in vars(self).items() if name != "start"}, "saved": self.saved}


def make_model(folder: Path, shape: str, seed: int, device: str) -> None:
    """A model with random weights, as a checkpoint."""
    from transformers import Qwen3Config, Qwen3ForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    torch.manual_seed(seed)
    with torch.device(device):
        Qwen3ForCausalLM(Qwen3Config(**SHAPES[shape])).save_pretrained(folder)


@dataclass
class Rollout:
    """Answers in the form that a trainer needs: rows of equal length, [rows, length]."""

    inputs: torch.Tensor
    targets: dict[str, torch.Tensor]
    rewards: list[float]
    tokens: int


def reward_of(answer: Sequence[int]) -> float:
    """Share of the answer's tokens that are even."""
    return sum(token % 2 == 0 for token in answer) / len(answer)


def roll_out(llm: LLM, settings: Settings, generator: torch.Generator, seed: int) -> list[Rollout]:
    """One cycle's answers, in micro-batches of rows of similar length."""
    low, high = settings.prompt_lengths
    lengths = torch.randint(low, high + 1, (settings.prompts,), generator=generator).tolist()
    prompts = [torch.randint(settings.num_tokens, (n,), generator=generator).tolist() for n in lengths]
    params = [
        SamplingParams(
            n=settings.answers,
            temperature=1.0,
            max_tokens=settings.answer_length,
            logprobs=0,
            ignore_eos=True,
            seed=seed * 1000 + number,
        )
        for number in range(len(prompts))
    ]
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
    rows = []
    for prompt, output in zip(prompts, outputs, strict=True):
        rewards = [reward_of(answer.token_ids) for answer in output.outputs]
        mean = sum(rewards) / len(rewards)
        spread = (sum((reward - mean) ** 2 for reward in rewards) / len(rewards)) ** 0.5
        for answer, reward in zip(output.outputs, rewards, strict=True):
            assert answer.logprobs is not None
            said = zip(answer.token_ids, answer.logprobs, strict=True)
            likely = [found[token].logprob for token, found in said]
            rows.append((prompt, answer.token_ids, likely, (reward - mean) / (spread + 1e-4), reward))
    rows.sort(key=lambda row: len(row[0]))
    return [_batch(rows[at : at + settings.rows]) for at in range(0, len(rows), settings.rows)]


def _batch(rows: list[Any]) -> Rollout:
    length = max(len(prompt) + len(answer) for prompt, answer, *_ in rows) - 1
    shape = (len(rows), length)
    ids, tokens = torch.zeros(shape, dtype=torch.int64), torch.zeros(shape, dtype=torch.int64)
    advantages, likely, counts = torch.zeros(shape), torch.zeros(shape), torch.zeros(shape)
    for row, (prompt, answer, logprobs, advantage, _) in enumerate(rows):
        whole = torch.tensor([*prompt, *answer])
        ids[row, : len(whole) - 1], tokens[row, : len(whole) - 1] = whole[:-1], whole[1:]
        answered = slice(len(prompt) - 1, len(whole) - 1)
        advantages[row, answered], counts[row, answered] = advantage, 1.0
        likely[row, answered] = torch.tensor(logprobs)
    targets = {"tokens": tokens, "advantages": advantages, "likely": likely, "counts": counts}
    return Rollout(ids, targets, [reward for *_, reward in rows], int(counts.sum()))


def grpo_loss(outputs: Any, targets: dict[str, torch.Tensor], mask: torch.Tensor) -> torch.Tensor:
    """The clipped objective over the tokens of answers. `mask`: which positions are not padding."""
    likely = outputs.logits.float().log_softmax(-1).gather(-1, targets["tokens"][..., None])[..., 0]
    ratio = (likely - targets["likely"]).exp()
    advantages = targets["advantages"]
    gained = torch.minimum(ratio * advantages, ratio.clamp(1 - CLIP, 1 + CLIP) * advantages)
    counts = targets["counts"] * mask
    return -(gained * counts).sum() / counts.sum().clamp(min=1)


class Trainer:
    """A transformers model, its optimizer and its captured step. Activations are in a pool that can be
    released while the engine works."""

    def __init__(self, folder: Path, device: torch.device, settings: Settings, *, rate: float) -> None:
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(folder).to(device).train()
        self.saver = MemorySaver(device)
        self._settings, self._device, self._rate = settings, device, rate
        self.step: TrainStep

    def share(self, llm: LLM) -> None:
        """Replace every parameter with the engine's tensor of that name, and of its type; buffers stay."""
        views = llm.shared_weights()
        for name, parameter in self.model.named_parameters():
            parameter.data = views[name]

    def prepare(self, micro_batches: int) -> None:
        """Call this once parameters are at their final place."""
        optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=self._rate, betas=(0.9, 0.95), weight_decay=0.0
        )
        self.step = graphed_train_step(
            self.model,
            grpo_loss,
            optimizer,
            ladder=self._settings.ladder,
            accumulate=micro_batches,
            clip_norm=1.0,
            autocast=torch.bfloat16 if self._device.type == "cuda" else None,
            pool=GraphPool(self._device, memory=GraphMemory(self.saver)),
        )

    def train(self, rollouts: list[Rollout]) -> None:
        """One update."""
        for rollout in rollouts:
            inputs = {
                "input_ids": rollout.inputs.to(self._device),
                "use_cache": False,
                "attention_mask": CAUSAL,
            }
            targets = {name: tensor.to(self._device) for name, tensor in rollout.targets.items()}
            self.step(inputs, targets)


class Loop:
    """The engine and the trainer, and whose turn it is."""

    def __init__(self, arguments: argparse.Namespace, folder: Path) -> None:
        self._arguments, self._folder = arguments, folder
        self.device = torch.device(arguments.device)
        self.settings = SETTINGS[arguments.shape]
        self._empty_cache()  # of what made the checkpoint
        self.memory = Memory(self.device)
        started = self.memory.note()
        self.memory.phase = "engine"
        self.llm = self._new_engine()
        with_engine = self.memory.note()
        self.memory.phase = "trainer"
        rate = 0.0 if arguments.frozen else self.settings.rate
        self.trainer = Trainer(folder, self.device, self.settings, rate=rate)
        if arguments.share_weights:
            self.trainer.share(self.llm)
        rows = self.settings.prompts * self.settings.answers
        self.trainer.prepare(rows // self.settings.rows)
        self._empty_cache()
        self.halves = Halves(started, with_engine - started)
        self._trainer_began_with = self.memory.note() - with_engine
        self._generator = torch.Generator().manual_seed(arguments.seed)
        self.cycles: list[dict[str, Any]] = []

    def _new_engine(self) -> LLM:
        on_gpu = self.device.type == "cuda"
        more = {"gpu_memory_utilization": 0.8} if on_gpu else {"num_pages": 512}
        return LLM(
            str(self._folder),
            device=self._arguments.device,
            dtype="bfloat16" if on_gpu else "auto",
            max_model_len=512 if on_gpu else 64,
            max_running_requests=self.settings.prompts * self.settings.answers,
            enable_sleep_mode=True,
            progress=False,
            **more,
        )

    def cycle(self, number: int) -> dict[str, Any]:
        """Rollout, sleep, training, new weights, awake again."""
        times: dict[str, float] = {}
        rollouts = self._timed(times, "rollout", lambda: self._roll_out(number))
        self._timed(times, "sleep", self._sleep)
        if number == 0:
            self.halves.engine_asleep = self.memory.note() - self.halves.start - self._trainer_began_with
        self._timed(times, "train", lambda: self._train(rollouts))
        self._timed(times, "wake_up", self._wake_up)
        rewards = [reward for rollout in rollouts for reward in rollout.rewards]
        cycle = {
            "cycle": number,
            "reward": sum(rewards) / len(rewards),
            "grad_norm": float(self.trainer.step.grad_norm),
            "tokens": sum(rollout.tokens for rollout in rollouts),
            "seconds": times,
            "weights": self.llm.weight_version,
            "engine_graphs": len(self.llm.graph_report().graphs),
            "engine_capture_ms": self.llm.graph_report().capture_ms,
            "training_graphs": len(self.trainer.step.report().graphs),
            "training_capture_ms": self.trainer.step.report().capture_ms,
        }
        self.cycles.append(cycle)
        return cycle

    def _timed(self, times: dict[str, float], phase: str, work: Any) -> Any:
        self.memory.phase = phase
        began = time.perf_counter()
        result = work()
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        times[phase] = time.perf_counter() - began
        self.memory.note()
        return result

    def _empty_cache(self) -> None:
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def _roll_out(self, number: int) -> list[Rollout]:
        seed = self._arguments.seed * 100_000 + number
        return roll_out(self.llm, self.settings, self._generator, seed)

    def _sleep(self) -> None:
        """Training needs shared weights awake; others are rewritten, so they may be dropped."""
        if self._arguments.tear_down:
            self.llm.close()
            self._empty_cache()
        elif self._arguments.share_weights:
            self.llm.sleep(level=1)
            self.llm.wake_up(["weights"])
        else:
            self.llm.sleep(level=2)

    def _train(self, rollouts: list[Rollout]) -> None:
        self.trainer.saver.resume()
        self.trainer.train(rollouts)
        self.trainer.saver.pause()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def _wake_up(self) -> None:
        new = {} if self._arguments.share_weights else dict(self.trainer.model.state_dict())
        if self._arguments.tear_down:
            self.trainer.model.save_pretrained(self._folder)
            self.llm = self._new_engine()
            return
        if not self._arguments.share_weights:
            self.llm.wake_up(["weights"])
        self.llm.update_weights(new)
        self.llm.wake_up()

    def captured_since(self, first: int) -> int:
        """Cycles after this one in which anything was captured."""
        keys = ("engine_graphs", "engine_capture_ms", "training_graphs", "training_capture_ms")
        seen = [[cycle[key] for key in keys] for cycle in self.cycles[first:]]
        return sum(one != other for one, other in pairwise(seen))

    def measured(self) -> Halves:
        """Memory that the halves took."""
        training = self.memory.most("train") - self.halves.start - self.halves.engine_asleep
        peak = self.memory.most("rollout", "sleep", "train", "wake_up") - self.halves.start
        return replace(self.halves, training=training, peak=peak)

    def compare(self) -> dict[str, Any]:
        """Compare a rollout of this engine with one of a new engine started with the trained weights."""
        number, state = len(self.cycles), self._generator.get_state()
        here = self._roll_out(number)
        self.trainer.model.save_pretrained(self._folder)
        self.llm.close()
        self._empty_cache()
        self.llm = self._new_engine()
        self._generator.set_state(state)
        there = self._roll_out(number)
        rows = [
            (
                torch.equal(one.inputs[row], other.inputs[row]),
                one.targets["likely"][row] - other.targets["likely"][row],
            )
            for one, other in zip(here, there, strict=True)
            for row in range(len(one.inputs))
        ]
        return {
            "answers": len(rows),
            "equal_answers": sum(same for same, _ in rows),
            "largest_difference_of_logprobs": max(float(gap.abs().max()) for _, gap in rows),
        }


COLOURS = {"rollout": "tab:blue", "sleep": "tab:grey", "train": "tab:orange", "wake_up": "tab:green"}


def _unit(most: int) -> tuple[str, int]:
    return ("GiB", 2**30) if most >= 2**30 else ("MiB", 2**20)


def draw(loops: list[dict[str, Any]], file: Path) -> None:
    """Memory over time, and rewards."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (memory, rewards) = plt.subplots(2, 1, figsize=(9, 7))
    samples = loops[0]["memory"]
    beyond = [sample["bytes"] - samples[0]["bytes"] for sample in samples]
    unit, size = _unit(max(beyond))
    times, held = [sample["seconds"] for sample in samples], [bytes_ / size for bytes_ in beyond]
    memory.plot(times, held, color="black", linewidth=0.8)
    for phase, colour in COLOURS.items():
        inside = [sample["phase"] == phase for sample in samples]
        memory.fill_between(times, held, where=inside, color=colour, alpha=0.6, step="pre", label=phase)
    memory.set(
        xlabel="seconds",
        ylabel=f"{unit} more than at the start",
        title="One device, two halves",
        ylim=(0, None),
    )
    memory.legend()
    for loop in loops:
        style = "--" if loop["frozen"] else "-"
        label = f"seed {loop['seed']}" + (", frozen" if loop["frozen"] else "")
        rewards.plot([cycle["reward"] for cycle in loop["cycles"]], style, label=label)
    rewards.set(xlabel="cycle", ylabel="mean reward")
    rewards.legend(fontsize="small")
    figure.tight_layout()
    figure.savefig(file)


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """All cycles of one seed."""
    torch.manual_seed(arguments.seed)
    with tempfile.TemporaryDirectory() as folder:
        make_model(Path(folder), arguments.shape, arguments.seed, arguments.device)
        loop = Loop(arguments, Path(folder))
        for number in range(arguments.cycles):
            cycle = loop.cycle(number)
            seconds = " ".join(f"{phase} {spent:.2f}" for phase, spent in cycle["seconds"].items())
            shown = f"reward {cycle['reward']:.3f}  gradients {cycle['grad_norm']:.3f}"
            print(f"seed {arguments.seed} cycle {number:3}  {shown}  {seconds}", flush=True)
        loop.memory.close()
        described = {
            "seed": arguments.seed,
            "frozen": arguments.frozen,
            "shared": arguments.share_weights,
            "torn_down": arguments.tear_down,
            "cycles": loop.cycles,
            "cycles_that_captured_again": loop.captured_since(0),
            "memory": loop.memory.samples,
            "bytes": loop.measured().described(),
        }
        if arguments.compare:
            described["beside_a_new_engine"] = loop.compare()
        summarize(described)
        loop.llm.close()
    return described


def summarize(loop: dict[str, Any]) -> None:
    """Print the results."""
    unit, size = _unit(max(loop["bytes"].values()))
    print(f"{unit}:", ", ".join(f"{half} {bytes_ / size:.1f}" for half, bytes_ in loop["bytes"].items()))
    later = [sum(cycle["seconds"].values()) for cycle in loop["cycles"][1:]]
    if later:
        print(f"a cycle after the first takes {sum(later) / len(later):.2f} s; captured again in", end=" ")
        print(f"{loop['cycles_that_captured_again']} of {len(later)}")
    if beside := loop.get("beside_a_new_engine"):
        print(
            f"a new engine with these weights: {beside['equal_answers']} of {beside['answers']} answers are "
            f"the same, logprobs differ by at most {beside['largest_difference_of_logprobs']:.3g}"
        )


def main() -> None:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--shape", default="tiny", choices=list(SHAPES))
    parser.add_argument("--cycles", type=int, default=25)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--frozen", action="store_true", help="run only the control: nothing is learnt")
    parser.add_argument("--control", action="store_true", help="also run the control, with the first seed")
    parser.add_argument("--share-weights", action="store_true", help="one set of weights for both halves")
    parser.add_argument(
        "--tear-down", action="store_true", help="close the engine instead of letting it sleep"
    )
    parser.add_argument("--compare", action="store_true", help="at the end, compare with a new engine")
    parser.add_argument("--json", type=Path, help="write all figures here")
    parser.add_argument("--picture", type=Path, help="draw memory over time and rewards")
    arguments = parser.parse_args()
    if arguments.cycles < 1:
        parser.error("--cycles must be at least 1")
    if arguments.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: there is no GPU here that torch can use")
    for file in (arguments.json, arguments.picture):
        if file is not None and not file.absolute().parent.is_dir():
            parser.error(f"there is no folder {file.parent} for {file.name}")
    if arguments.device == "cpu":
        torch.set_num_threads(1)  # tiny tensors gain nothing from more
    ways = [{"seed": seed} for seed in arguments.seeds]
    if arguments.control:
        ways.append({"seed": arguments.seeds[0], "frozen": True})
    loops = []
    for way in ways:
        loops.append(run(argparse.Namespace(**{**vars(arguments), **way})))
        if arguments.json:
            described = {
                "example": "rl_colocated",
                "machine": machine(),
                "shape": arguments.shape,
                "loops": loops,
            }
            arguments.json.write_text(json.dumps(described) + "\n")
    if arguments.picture:
        draw(loops, arguments.picture)


if __name__ == "__main__":
    main()
