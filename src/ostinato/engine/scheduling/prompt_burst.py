"""Steps that compute prompts only, while the running requests sit them out.

Note [Prompt bursts]
A step can hold decodes and prompts together, at a price: its decodes are computed by the kernels for
prompts, which give each of them a block of its own, mostly padding; and as long as half of a batch waits for
its prompt, the other half decodes in steps that cost nearly as much as full ones. So decodes sit out up to
`prompt_burst` prompt steps in a row, and the step that ends a burst takes all of them along.

Whether it pays: by sitting out, a decode loses the token that the step would have brought it. For that,
prompts must be at least half of what the step could compute, and a quarter of `max_batched_tokens`. The fewer
tokens a step has, the more of its time goes into reading weights, which decodes read as well: they would come
along nearly for free, and wait for a whole step instead. So one short prompt never stops a full batch.

How many tokens prompts bring is known when they are admitted, and admission is not undone. It is given the
whole step only if what decodes leave of one holds as many tokens as it takes to sit out: fewer than that then
still fit beside the decodes.

The bound: a decode that is ready stays ready until it runs, every step that ready decodes sit out is counted,
and the first that is not sat out takes all of them. Hence each sits out at most `prompt_burst` in a row, and
runs in one of any `prompt_burst` + 1 steps. Where prompts cannot go on, for want of pages or rows, a step has
none of their tokens and is not sat out: those who have the pages run until they give them back.

Pages: in every step, sat out or not, each ready decode first gets the page that its next token needs, and
nobody is admitted who does not leave one more for each (`Scheduler._has_room_for`). But decodes that sit out
also end later, so that more requests run at a time and grow; when pages run out, the youngest are computed
twice. Hence a burst needs plenty of pages: for a step full of prompts, and two for each request that can run.
With less, steps are what they are without bursts.
"""

from __future__ import annotations

from .scheduler_config import SchedulerConfig


class PromptBurst:
    """How many steps in a row were sat out, and what it takes for another one."""

    def __init__(self, config: SchedulerConfig, page_size: int) -> None:
        """For a scheduler with these limits and pages of so many tokens."""
        self._longest = config.prompt_burst
        self._step_tokens = config.max_batched_tokens
        self._plenty = -(-config.max_batched_tokens // page_size) + 2 * config.max_running
        self._length = 0

    def enough(self, num_decodes: int, num_free_pages: int) -> int | None:
        """The prompt tokens for which so many ready decodes sit out the next step; None: they do not."""
        if not num_decodes or self._length == self._longest or num_free_pages < self._plenty:
            return None
        enough = max(-(-self._step_tokens // 4), num_decodes)
        return enough if enough + num_decodes <= self._step_tokens else None

    def count(self, *, is_sat_out: bool) -> None:
        """Take note of a step."""
        self._length = self._length + 1 if is_sat_out else 0
