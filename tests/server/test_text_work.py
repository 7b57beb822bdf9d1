"""Texts on their way to token ids, without a server around: each lane gives what the tokenizer gives."""

import asyncio
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest

from ostinato.server.text_work import lanes as lanes_module
from ostinato.server.text_work.lanes import IN_THREAD, INLINE, LanesFull, TextLanes
from ostinato.server.text_work.work import Conversation, TextLimit, TextRefused, TextWork
from ostinato.text.tokenizer import Tokenizer


def on(model: Path, act: Any) -> Any:
    """What `act(lanes, tokenizer)` gives."""

    async def scenario() -> Any:
        tokenizer = Tokenizer.from_directory(model)
        lanes = TextLanes(tokenizer, str(model), None)
        try:
            return await act(lanes, tokenizer)
        finally:
            lanes.close()

    return asyncio.run(scenario())


def work(given: str | Conversation, limit: TextLimit | None = None) -> TextWork:
    return TextWork(given, True, limit, "prompt")


def test_all_lanes_give_what_the_tokenizer_gives(model: Path) -> None:
    async def act(lanes: TextLanes, tokenizer: Tokenizer) -> None:
        for size in (INLINE // 4, IN_THREAD // 4, IN_THREAD):
            text = "héllo" * size
            assert await lanes.ids(work(text)) == tokenizer.encode(text)
            messages = [{"role": "user", "content": text}]
            said = Conversation(messages, None, True, {}, False)
            assert await lanes.ids(TextWork(said, False, None, "messages")) == tokenizer.encode_chat(messages)

    on(model, act)


def test_what_must_be_too_long_is_refused_in_every_lane(model: Path) -> None:
    async def act(lanes: TextLanes, tokenizer: Tokenizer) -> None:
        limit = TextLimit(10, 21)
        assert await lanes.ids(work("x" * 210, limit))
        for size in (211, IN_THREAD, 2 * IN_THREAD):
            said = Conversation([{"role": "user", "content": "x" * size}], None, True, {}, False)
            for given in ("x" * size, said):
                with pytest.raises(TextRefused, match="at most 10 tokens") as refused:
                    await lanes.ids(work(given, limit))
                assert refused.value.code == "context_length_exceeded"

    on(model, act)


def test_a_process_that_dies_costs_no_text_and_one_that_takes_too_long_costs_one(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refusal(asked: Coroutine[Any, Any, list[int]]) -> TextRefused:
        with pytest.raises(TextRefused) as refused:
            await asked
        return refused.value

    async def act(lanes: TextLanes, tokenizer: Tokenizer) -> None:
        text = "x" * (IN_THREAD + 1)
        assert len(await lanes.ids(work(text))) == len(text)
        process = lanes._long._process
        assert process is not None
        process.kill()
        assert len(await lanes.ids(work(text))) == len(text), "another process does it"
        monkeypatch.setattr(lanes_module, "SECONDS", 0.01)
        began = time.monotonic()
        error = await refusal(lanes.ids(work(text)))
        assert error.code == "text_too_hard"
        assert time.monotonic() - began < 2
        monkeypatch.setattr(lanes_module, "SECONDS", 60.0)
        asked = asyncio.create_task(lanes.ids(work(text)))
        await asyncio.sleep(0.05)
        asked.cancel()  # its client has left
        await asyncio.sleep(0)
        assert len(await lanes.ids(work(text))) == len(text)

    on(model, act)


def test_a_text_whose_processes_die_is_refused(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lanes_module, "MEMORY_BYTES", 2**24)

    async def act(lanes: TextLanes, tokenizer: Tokenizer) -> None:
        with pytest.raises(TextRefused, match="too much memory") as refused:
            await lanes.ids(work("x" * (IN_THREAD + 1)))
        assert refused.value.code == "text_too_hard"

    on(model, act)


def test_a_lane_holds_so_much_and_no_more(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lanes_module, "WAITING", 3 * IN_THREAD)

    async def act(lanes: TextLanes, tokenizer: Tokenizer) -> list[Any]:
        asked = [lanes.ids(work("x" * (IN_THREAD + 1))) for _ in range(4)]
        return list(await asyncio.gather(*asked, return_exceptions=True))

    found = on(model, act)
    assert sum(isinstance(each, LanesFull) for each in found) == 2
    assert sum(isinstance(each, list) for each in found) == 2


def test_templates_of_clients_keep_only_one_another_waiting(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def templated(source: str) -> TextWork:
        said = Conversation([{"role": "user", "content": "a"}], None, True, {}, False, source)
        return TextWork(said, False, None, "messages")

    async def act(lanes: TextLanes, tokenizer: Tokenizer) -> None:
        assert await lanes.ids(templated("{{ messages[0].content }}")) == tokenizer.encode("a")
        assert len(await lanes.ids(work("x" * (IN_THREAD + 1)))) == IN_THREAD + 1
        monkeypatch.setattr(lanes_module, "TEMPLATE_SECONDS", 3.0)
        slow = asyncio.create_task(lanes.ids(templated("{{ 9 ** (9 ** 9) }}")))
        await asyncio.sleep(0)
        assert len(await lanes.ids(work("x" * (IN_THREAD + 1)))) == IN_THREAD + 1
        assert not slow.done()
        with pytest.raises(TextRefused, match="longer than 3 s") as refused:
            await slow
        assert refused.value.field == "chat_template"
        assert await lanes.ids(templated("{{ messages[0].content }}")) == tokenizer.encode("a")

    on(model, act)
