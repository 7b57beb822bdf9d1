"""Workloads: prompts as random token ids, and how many tokens each answer must have."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

SHORTEST, LONGEST = 100, 1024
"""Bounds of the lengths of `Workload.mixed`."""


@dataclass(frozen=True)
class Workload:
    """Requests submitted at once; greedy, and not ended by end-of-sequence tokens."""

    prompts: tuple[tuple[int, ...], ...]
    output_lens: tuple[int, ...]

    @classmethod
    def uniform(cls, batch: int, input_len: int, output_len: int, vocab: int) -> Workload:
        """Requests of equal length. Prompt i is the same in every batch, so one reference serves them all."""
        prompts = tuple(_random_ids(random.Random(i), input_len, vocab) for i in range(batch))
        return cls(prompts, (output_len,) * batch)

    @classmethod
    def mixed(cls, num_prompts: int, vocab: int, scale: float = 1.0) -> Workload:
        """Input and output lengths uniform in 100..1024, times `scale`; always the same lengths."""
        draw = random.Random(0)
        inputs = [draw.randint(SHORTEST, LONGEST) for _ in range(num_prompts)]
        outputs = [draw.randint(SHORTEST, LONGEST) for _ in range(num_prompts)]
        prompts = tuple(_random_ids(draw, _scaled(length, scale), vocab) for length in inputs)
        return cls(prompts, tuple(_scaled(length, scale) for length in outputs))

    def __len__(self) -> int:
        return len(self.prompts)

    def __str__(self) -> str:
        return f"{len(self)} requests, {self.input_tokens:,} tokens in, {self.output_tokens:,} out"

    @property
    def input_tokens(self) -> int:
        """Tokens of all prompts."""
        return sum(map(len, self.prompts))

    @property
    def output_tokens(self) -> int:
        """Tokens of all answers."""
        return sum(self.output_lens)

    @property
    def longest(self) -> int:
        """Tokens of the longest request, prompt and answer."""
        return max(len(prompt) + out for prompt, out in zip(self.prompts, self.output_lens, strict=True))

    def shortened(self, output_len: int) -> Workload:
        """The same prompts with answers of at most `output_len` tokens."""
        return replace(self, output_lens=tuple(min(length, output_len) for length in self.output_lens))

    def first(self, count: int) -> Workload:
        """Only the first `count` requests."""
        return Workload(self.prompts[:count], self.output_lens[:count])

    def single(self, index: int) -> Workload:
        """One of the requests by itself."""
        return Workload((self.prompts[index],), (self.output_lens[index],))


def _random_ids(draw: random.Random, count: int, vocab: int) -> tuple[int, ...]:
    return tuple(draw.randrange(vocab) for _ in range(count))


def _scaled(length: int, scale: float) -> int:
    return max(1, round(length * scale))
