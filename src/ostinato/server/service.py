"""What all endpoints share: the engine, the model, the limits, and the requests under way."""

from __future__ import annotations

import math
import re
from collections import deque
from pathlib import Path
from secrets import token_hex
from time import monotonic

from ostinato.graphs.errors import ConfigError
from ostinato.text.chat_template import template_source
from ostinato.text.errors import TokenizerError
from ostinato.text.tokenizer import Tokenizer

from .config import ServerConfig
from .engine_client.client import EngineClient, EngineState
from .log_lines import announce
from .metrics.history import History
from .metrics.request_metrics import RequestMetrics
from .openai.completion import Completion
from .openai.cost import check_cost
from .openai.errors import ApiError, refused, unavailable
from .openai.generation import Generation
from .openai.requests import Sampling
from .openai.served_model import ServedModel
from .openai.stream_pace import StreamPace
from .request_log import RequestLog
from .tenants.key_table import KeyTable
from .tenants.tenant import current_key, current_tenant
from .wire.messages import AdapterInfo, Ready

_HEADER_ID = re.compile(r"[A-Za-z0-9._:\-]{1,128}")


class Service:
    """One server's state. Used from one event loop."""

    def __init__(self, config: ServerConfig, engine: EngineClient, model_name: str) -> None:
        self.config = config
        self.engine = engine
        self.model_name = model_name
        self.model: ServedModel | None = None
        self.keys = KeyTable(config)
        self.is_stopping = False
        self.metrics = RequestMetrics()
        self.history = History(self.metrics, engine)
        self.generations: dict[str, Generation] = {}
        """Requests under way by the id of their answer."""
        self._chat_template = _chat_template(config.chat_template)
        self._ends: deque[float] = deque(maxlen=256)
        self._pace = StreamPace()
        self._log = RequestLog(is_on=config.enable_log_requests)

    def on_ready(self, ready: Ready) -> None:
        """An engine has started: read its tokenizer."""
        tokenizer = None
        if ready.has_tokenizer:
            try:
                tokenizer = Tokenizer.from_directory(Path(ready.tokenizer_directory))
            except TokenizerError as error:  # the engine has read the same files a moment ago
                raise RuntimeError(f"the tokenizer changed under the server: {error}") from error
        if tokenizer is not None and self._chat_template is not None:
            tokenizer = tokenizer.with_chat_template(self._chat_template)
        self.close()
        before, self.model = self.model, ServedModel(self.model_name, ready, self.config, tokenizer)
        lost = {**({} if before is None else before.lost_adapters), **ready.lost_adapters}
        self.model.lost_adapters = {name: lost[name] for name in lost.keys() - self.model.adapters.keys()}
        for name, why in ready.lost_adapters.items():
            announce(f"adapter {name!r} is not there any more: {why}")

    @property
    def adapters(self) -> list[AdapterInfo] | None:
        """What an engine that is started again has to load; None: what its options say."""
        return None if self.model is None else list(self.model.adapters.values())

    def close(self) -> None:
        """End what works for the model."""
        if self.model is not None:
            self.model.close()

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
        return self.model.named(name)

    def admit(self, count: int) -> None:
        """Let `count` engine requests in, or answer 429.

        A tenant may fill the queue while nobody else needs it; whoever comes then still gets its share.
        """
        model = self.serving()
        room = model.ready.max_running + self.config.max_queued_requests
        if count > room:
            message = f"the request asks for {count} completions at once, at most {room} are accepted"
            raise ApiError(400, message, param="n")
        total, tenant = self.engine.num_unfinished + count, current_tenant.get()
        share = room * self.engine.share_of(tenant)
        has_place = total <= room or (tenant.num_unfinished + count <= share and total <= 2 * room)
        if not has_place:
            self.metrics.rejected += 1
            tenant.counts.refused["queue_full"] += 1
            message = f"{self.engine.num_unfinished} requests are running or waiting: the queue is full"
            if tenant.num_unfinished < self.engine.num_unfinished:
                message += f"; {tenant.num_unfinished} of them are yours, your share is {share:.0f}"
            headers = {"Retry-After": str(self.retry_after())}
            raise ApiError(429, message, code="queue_full", headers=headers)

    def wakes_every(self, streams: bool | None) -> int:
        """After how many tokens an answer goes on; 0: only the end counts."""
        return self.config.stream_interval if streams else 0

    def retry_after(self) -> int:
        """Seconds in which an eighth of those under way have ended, at the pace of the last ones; 1 to 60."""
        if len(self._ends) < 2 or self._ends[-1] <= self._ends[0]:
            return 1
        pace = len(self._ends) / (self._ends[-1] - self._ends[0])
        return max(1, min(60, math.ceil(self.engine.num_unfinished / 8 / pace)))

    def generation(self, id: str, completions: list[Completion]) -> Generation:
        """Admit and start; the caller must `end` it, whatever happens."""
        check_cost(completions, self.serving().ready.vocab_size)
        self.admit(len(completions))
        prompts = [completion.prompt_ids for completion in completions if completion.number == 0]
        current_tenant.get().take_prompt(sum(map(len, prompts)), len(completions))
        timeout = self.config.request_timeout
        generation = Generation(id, completions, timeout=timeout, pace=self._pace, on_end=self._on_end)
        generation.key = current_key.get()
        self.generations[generation.id] = generation
        self._log.began(generation)
        generation.start(self.engine)
        return generation

    def end_revoked(self) -> None:
        """End all requests under way whose keys are not valid any more."""
        for generation in list(self.generations.values()):
            if (refusal := self.keys.refusal(generation.key)) is not None:
                generation.end(refused(refusal))

    def answer_id(self, kind: str, asked: Sampling | None = None, header: str | None = None) -> str:
        """The id of an answer: as its request asks for, or as its X-Request-Id says, or a new one."""
        if asked is not None and (asked.rid or asked.request_id):
            name = "rid" if asked.rid else "request_id"
            id = asked.rid or f"{kind}-{asked.request_id}"
            if id in self.generations:
                raise ApiError(400, f"{name}: a request with this id is under way", param=name)
            return id
        if header is not None and _HEADER_ID.fullmatch(header) and f"{kind}-{header}" not in self.generations:
            return f"{kind}-{header}"
        return f"{kind}-{token_hex(16)}"

    def _on_end(self, generation: Generation) -> None:
        self.generations.pop(generation.id, None)
        self._log.ended(generation)
        prompts = len({id(completion.prompt_ids) for completion in generation.completions})
        for completion in generation.completions:
            self._ends.append(monotonic())
            self.metrics.observe(completion, n=len(generation.completions) // prompts)


def _chat_template(given: str | None) -> str | None:
    try:
        return None if given is None else template_source(given)
    except TokenizerError as error:
        raise ConfigError(f"chat_template: {error}") from error
