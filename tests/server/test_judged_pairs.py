"""`/score` and `/rerank` of a model with a head: what it says of each pair, not how near vectors are."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from engine.conftest import TINY, write_byte_tokenizer
from ostinato.engine.llm import LLM
from ostinato.server.config import ServerConfig
from ostinato.server.engine_process.main import _ready
from ostinato.server.engine_process.served_engine import ServedEngine
from ostinato.server.openai.errors import ApiError
from ostinato.server.openai.scoring import RerankRequest, ScoreRequest, rerank, score
from ostinato.server.openai.served_model import ServedModel
from ostinato.server.tenants.tenant import Tenant
from ostinato.server.text_work import lanes
from ostinato.server.wire.messages import Embed

SMALL = {"max_model_len": 64, "max_running_requests": 4, "num_pages": 40, "cuda_graph_mode": "none"}


class InPlace:
    """The engine of a server without the process around it."""

    def __init__(self, llm: LLM) -> None:
        self._engine = ServedEngine(llm.engine.core)
        self._listeners: list[Any] = []

    def embed(
        self,
        ids: list[int],
        pooling: str,
        listener: Any,
        adapter: str | None,
        cache_salt: str | None,
        tenant: Tenant,
    ) -> int:
        self._listeners.append(listener)
        asked = Embed(len(self._listeners) - 1, ids, pooling, adapter, cache_salt)
        assert self._engine.embed(asked) == []
        while self._engine.is_busy:
            for news in self._engine.step().news:
                self._listeners[news.id].take_in(news)
        return len(self._listeners) - 1

    def forget(self, ids: list[int]) -> None:
        pass


def saved(directory: Path, labels: int) -> Path:
    import transformers

    config = transformers.Qwen2Config(**{**TINY, "num_hidden_layers": 1}, num_labels=labels, pad_token_id=0)
    transformers.Qwen2ForSequenceClassification(config).save_pretrained(directory)
    write_byte_tokenizer(directory)
    return directory


@pytest.fixture(scope="module")
def judge(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    with LLM(str(saved(tmp_path_factory.mktemp("judge"), 1)), **SMALL) as llm:
        yield llm


def answer_of(llm: LLM, ask: Callable[[Any, ServedModel], Awaitable[Any]]) -> Any:
    async def asked() -> Any:
        model = ServedModel("judge", _ready(llm, {}), ServerConfig(), llm.engine.tokenizer)
        try:
            return await ask(InPlace(llm), model)
        finally:
            model.close()

    return asyncio.run(asked())


def test_the_head_judges_pairs(judge: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lanes, "INLINE", 3)  # the shorter pair at once, the longer one in a thread
    expected = [output.outputs.score for output in judge.score("ab", ["c", "cdef"])]
    body = ScoreRequest(text_1="ab", text_2=["c", "cdef"])
    found = answer_of(judge, lambda engine, model: score(body, engine, model))
    assert [each.score for each in found.data] == pytest.approx(expected)
    assert found.usage.prompt_tokens == 3 + 6
    ranking = RerankRequest(query="ab", documents=["c", "cdef"], top_n=1)
    [best] = answer_of(judge, lambda engine, model: rerank(ranking, engine, model)).results
    assert best.relevance_score == pytest.approx(max(expected))


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (ScoreRequest(text_1="a", text_2="b", pooling="mean"), "pooling"),
        (ScoreRequest(text_1="a", text_2="x" * 5000), "text"),
    ],
)
def test_what_the_head_cannot_be_asked_is_refused(judge: LLM, body: ScoreRequest, param: str) -> None:
    with pytest.raises(ApiError) as refused:
        answer_of(judge, lambda engine, model: score(body, engine, model))
    assert (refused.value.status, refused.value.param) == (400, param)


def test_a_head_of_several_labels_gives_no_score(tmp_path: Path) -> None:
    body = ScoreRequest(text_1="a", text_2="b")
    with (
        LLM(str(saved(tmp_path, 3)), **SMALL) as llm,
        pytest.raises(ApiError, match="one label, and 'judge' has 3"),
    ):
        answer_of(llm, lambda engine, model: score(body, engine, model))
