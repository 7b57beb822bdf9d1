"""All completions of one HTTP request: started, waited for, timed out, ended together."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence

from ..engine_client.client import EngineClient, EngineGone
from .completion import Completion
from .draft_metrics import Drafts
from .errors import ApiError, unavailable
from .responses import CachedTokens, Usage
from .stream_pace import StreamPace


class ClientGone(Exception):
    """The client has closed its connection; there is nobody to answer."""


class Generation:
    """Wakes its reader when something has come. A reader that is slow finds all of it at once."""

    def __init__(
        self,
        id: str,
        completions: Sequence[Completion],
        *,
        timeout: float,
        pace: StreamPace,
        on_end: Callable[[Generation], None],
    ) -> None:
        """`on_end` is called once, when it has ended."""
        self.id = id
        self.created = int(time.time())
        self.completions = completions
        self.error: ApiError | ClientGone | None = None
        """Why it ended early, if it did."""
        self.key = b""
        """The SHA-256 of the key that it was asked for with."""
        self._timeout = timeout
        self._pace = pace
        self._timer: asyncio.TimerHandle | None = None
        self._engine: EngineClient | None = None
        self._on_end: Callable[[Generation], None] | None = on_end
        self._changed = asyncio.Event()

    @property
    def is_finished(self) -> bool:
        """Whether every completion has its end."""
        return all(completion.is_finished for completion in self.completions)

    @property
    def usage(self) -> Usage:
        """Tokens so far; the completions of one prompt count it once."""
        prompts = {id(completion.prompt_ids): completion.prompt_ids for completion in self.completions}
        prompt = sum(map(len, prompts.values()))
        generated = sum(completion.num_tokens for completion in self.completions)
        cached = {
            key: max(c.num_cached_tokens for c in self.completions if id(c.prompt_ids) == key)
            for key in prompts
        }
        return Usage(prompt, generated, prompt + generated, CachedTokens(sum(cached.values())))

    @property
    def drafts(self) -> list[Drafts | None]:
        """What drafts brought its completions, once they are finished."""
        return [completion.drafts for completion in self.completions]

    def start(self, engine: EngineClient) -> None:
        """Ask the engine for all of them."""
        self._engine = engine
        self._timer = asyncio.get_running_loop().call_later(self._timeout, self._expire)
        changed = self._changed
        try:
            Completion.start(self.completions, engine, changed.set, lambda: self._pace.wake(changed))
        except EngineGone as error:
            self.end(unavailable(str(error)))

    async def changed(self) -> None:
        """Wait until something has come; raises what ended it early."""
        await self._changed.wait()
        self._changed.clear()
        self.check()

    async def finished(self) -> None:
        """Wait for the end of all completions."""
        while not self.is_finished:
            await self.changed()
        self.check()

    def check(self) -> None:
        """Raise what went wrong, if something did."""
        if self.error is None:
            self.error = next((c.error for c in self.completions if c.error is not None), None)
        if self.error is not None:
            raise self.error

    def abort(self) -> None:
        """Have the engine end all of it; readers get what there is."""
        for completion in self.completions:
            completion.abort()

    def end(self, error: ApiError | ClientGone | None = None) -> None:
        """Abort what is unfinished and wake the reader; may be called any number of times."""
        if self.error is None and not self.is_finished:
            self.error = error
        for completion in self.completions:
            completion.close()
        if self._timer is not None:
            self._timer.cancel()
        self._changed.set()
        if self._on_end is not None:
            on_end, self._on_end = self._on_end, None
            on_end(self)

    @property
    def weight_version(self) -> str:
        """Of the weights that the last of its tokens was computed with."""
        return self.completions[-1].weight_version

    def _expire(self) -> None:
        why = None if self._engine is None else self._engine.standing.why_no_step
        reason = "" if why is None else f": {why}"
        self.end(ApiError(504, f"the request took longer than {self._timeout:g} s{reason}", code="timeout"))
