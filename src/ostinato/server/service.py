"""What all endpoints share: the engine, the model, the limits, and the requests under way."""

from __future__ import annotations

import math
from collections import deque
from pathlib import Path
from time import monotonic

from ostinato.text.errors import TokenizerError
from ostinato.text.tokenizer import Tokenizer

from .config import ServerConfig
from .engine_client.client import EngineClient, EngineState
from .metrics.request_metrics import RequestMetrics
from .openai.completion import Completion
from .openai.errors import ApiError, unavailable
from .openai.generation import Generation
from .openai.requests import Sampling
from .openai.served_model import ServedModel
from .openai.stream_pace import StreamPace
from .openai.tool_calls.formats import kind_of_model
from .wire.messages import Ready


class Service:
    """One server's state. Used from one event loop."""

    def __init__(self, config: ServerConfig, engine: EngineClient, model_name: str) -> None:
        self.config = config
        self.engine = engine
        self.model_name = model_name
        self.model: ServedModel | None = None
        self.is_stopping = False
        self.metrics = RequestMetrics()
        self.generations: dict[str, Generation] = {}
        """Requests under way by the id of their answer."""
        self.tool_call_kind = "none"
        self._ends: deque[float] = deque(maxlen=256)
        self._pace = StreamPace()

    def on_ready(self, ready: Ready) -> None:
        """An engine has started: read its tokenizer."""
        tokenizer = None
        if ready.has_tokenizer:
            try:
                tokenizer = Tokenizer.from_directory(Path(ready.directory))
            except TokenizerError as error:  # the engine has read the same files a moment ago
                raise RuntimeError(f"the tokenizer changed under the server: {error}") from error
        self.model = ServedModel(self.model_name, ready, self.config, tokenizer)
        kind = self.config.tool_call_parser
        if kind == "auto":
            kind = kind_of_model(Path(ready.directory))
        self.tool_call_kind = kind

    @property
    def health(self) -> tuple[bool, str]:
        """Whether requests are served, and a word for the state."""
        if self.is_stopping:
            return False, "stopping"
        return self.engine.state is EngineState.READY, str(self.engine.state)

    def serving(self, name: str | None = None) -> ServedModel:
        """The model; 503 while there is none to serve with, 404 for another name."""
        healthy, state = self.health
        if not healthy or self.model is None:
            detail = f": {self.engine.progress}" if state == EngineState.LOADING else ""
            raise unavailable(f"the server is {state}{detail}")
        self.model.check_name(name)
        return self.model

    def admit(self, count: int) -> None:
        """Let `count` engine requests in, or answer 429."""
        model = self.serving()
        room = model.ready.max_running + self.config.max_queued_requests
        if count > room:
            message = f"the request asks for {count} completions at once, at most {room} are accepted"
            raise ApiError(400, message, param="n")
        if self.engine.num_unfinished + count > room:
            self.metrics.rejected += 1
            raise ApiError(
                429,
                f"{self.engine.num_unfinished} requests are running or waiting: the queue is full",
                code="queue_full",
                headers={"Retry-After": str(self.retry_after())},
            )

    def wakes_every(self, body: Sampling) -> int:
        """After how many tokens the answer to `body` goes on; 0: only the end counts."""
        return self.config.stream_interval if body.stream else 0

    def retry_after(self) -> int:
        """Seconds in which an eighth of those under way have ended, at the pace of the last ones; 1 to 60."""
        if len(self._ends) < 2 or self._ends[-1] <= self._ends[0]:
            return 1
        pace = len(self._ends) / (self._ends[-1] - self._ends[0])
        return max(1, min(60, math.ceil(self.engine.num_unfinished / 8 / pace)))

    def generation(self, kind: str, completions: list[Completion]) -> Generation:
        """Admit and start; the caller must `end` it, whatever happens."""
        self.admit(len(completions))
        timeout = self.config.request_timeout
        generation = Generation(kind, completions, timeout=timeout, pace=self._pace, on_end=self._on_end)
        self.generations[generation.id] = generation
        generation.start(self.engine)
        return generation

    def _on_end(self, generation: Generation) -> None:
        self.generations.pop(generation.id, None)
        for completion in generation.completions:
            self._ends.append(monotonic())
            self.metrics.observe(completion)
