"""A tiny model with adapters of several kinds, and what each of them should say."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from models.small_adapters import ALL, write_adapter
from ostinato import LLM, LoRARequest, SamplingParams

from .conftest import TinyModel
from .greedy_reference import assert_greedy

KINDS: tuple[dict[str, Any], ...] = (
    {"rank": 4, "targets": ("q_proj", "v_proj")},
    {"rank": 8, "targets": ALL, "use_rslora": True},
    {"rank": 2, "targets": ("o_proj", "gate_proj", "down_proj"), "pickled": True},
    {"rank": 3, "targets": ALL, "rank_pattern": {"k_proj": 5}, "alpha_pattern": {"up_proj": 11}},
    {"rank": 1, "targets": ("up_proj",), "lora_alpha": 8},
)
GREEDY = SamplingParams(temperature=0, max_tokens=8)


@dataclass
class LoraWorld:
    """Adapters by number; None is the model without one."""

    base: TinyModel
    adapted: list[TinyModel]

    @classmethod
    def make(cls, directory: Path, family: str = "Llama", **fields: Any) -> "LoraWorld":
        """On disk."""
        base = TinyModel(directory / "base", family, **fields)
        adapted = []
        for number, kind in enumerate(KINDS):
            place = directory / f"adapter-{number}"
            adapted.append(TinyModel.saved(place, write_adapter(place, base.reference, seed=number, **kind)))
        return cls(base, adapted)

    def path(self, number: int) -> str:
        """Where an adapter is."""
        return self.adapted[number].directory

    def asked(self, number: int | None) -> LoRARequest | None:
        """Under a name of its own."""
        return None if number is None else LoRARequest(f"adapter-{number}", number + 1, self.path(number))

    def expected(self, number: int | None, prompt: Any, count: int = 8) -> list[int]:
        """Greedy tokens of transformers."""
        model = self.base if number is None else self.adapted[number]
        return model.greedy(tuple(prompt["prompt_token_ids"]), count)

    def check(self, llm: LLM, prompts: list[Any], numbers: list[int | None], count: int = 8) -> list[Any]:
        """Generate a batch and compare all of it."""
        params = SamplingParams(temperature=0, max_tokens=count)
        outputs = llm.generate(prompts, params, lora_request=[self.asked(number) for number in numbers])
        for prompt, number, output in zip(prompts, numbers, outputs, strict=True):
            assert output.error is None
            model, found = self.base if number is None else self.adapted[number], output.outputs[0].token_ids
            assert len(found) == count
            assert_greedy(model.reference, prompt["prompt_token_ids"], found)
        return outputs
