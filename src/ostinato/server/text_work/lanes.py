"""Who works on which text: short ones at once, longer ones in threads, long ones in processes of their own.

A long text waits only for others of its kind, so that no number of them keeps a short one waiting; those of
several tenants take turns by fair shares.
"""

from __future__ import annotations

import array
import asyncio
import contextlib
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec

from ostinato.text.tokenizer import Tokenizer

from ..tenants.fair_turns import FairTurns
from .work import Conversation, TextRefused, TextWork, check_length, do_text_work
from .worker import LENGTH, Answer, Refused, Start

INLINE = 2_000
"""Characters that take about a millisecond."""
IN_THREAD = 65_536
NUM_THREADS = 2
LONG = 1_048_576
"""Longer texts have a lane of their own, and their process ends with each: it has used much memory."""
SECONDS = 60.0
"""What takes longer is given up."""
MEMORY_BYTES = 6 * 2**30
TEMPLATE_SECONDS = 10.0
"""The same for a client's chat template, which is a program: it may loop, and its constants are computed when
it is compiled."""
TEMPLATE_MEMORY_BYTES = 2 * 2**30
WAITING = 64 * 2**20
"""Characters that may wait in one lane."""
IDLE_SECONDS = 60.0
"""After which a process that nobody has work for ends."""


class LanesFull(Exception):
    """There is no room for another text now."""


class TextLanes:
    """Turns texts into token ids. Used from one event loop."""

    def __init__(self, tokenizer: Tokenizer, directory: str, chat_template: str | None) -> None:
        # Batches of the tokenizers library share one pool of threads, where long texts would fill all places.
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        self._tokenizer = tokenizer
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="ostinato-text")
        self._turns = FairTurns(NUM_THREADS, WAITING)
        start = Start(directory, chat_template, MEMORY_BYTES)
        self._long = _Lane(start)
        self._longest = _Lane(start, ends_after_each=True)
        # Of its own: templates that take long keep only other clients' templates waiting.
        self._templates = _Lane(Start(directory, chat_template, TEMPLATE_MEMORY_BYTES), is_for_templates=True)

    async def ids(self, work: TextWork) -> list[int]:
        """The token ids. Raises `TextRefused`, or `LanesFull` while too much is waiting."""
        size = size_of(work.given) + len(work.other or "")
        if isinstance(work.given, str):
            for text in (work.given, work.other or ""):
                check_length(text, work.limit, work.name)
        if isinstance(work.given, Conversation) and work.given.template is not None:
            return await self._templates.ids(work, size + len(work.given.template))
        if size <= INLINE:
            return do_text_work(work, self._tokenizer)
        if size <= IN_THREAD:
            return await self._by_thread(work, size)
        return await (self._long if size <= LONG else self._longest).ids(work, size)

    def close(self) -> None:
        """End the processes."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        for lane in (self._long, self._longest, self._templates):
            lane.close()

    async def _by_thread(self, work: TextWork, size: int) -> list[int]:
        if not self._turns.has_room(size):
            raise LanesFull("too many texts wait for the tokenizer")
        async with self._turns.turn(size):
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(self._threads, do_text_work, work, self._tokenizer)


class _Lane:
    """A process that does one piece of work after the other."""

    def __init__(
        self, start: Start, *, ends_after_each: bool = False, is_for_templates: bool = False
    ) -> None:
        self._start = start
        self._ends_after_each = ends_after_each
        self._is_for_templates = is_for_templates
        self._turns = FairTurns(1, WAITING)
        self._process: asyncio.subprocess.Process | None = None
        self._idle: asyncio.TimerHandle | None = None

    async def ids(self, work: TextWork, size: int) -> list[int]:
        if not self._turns.has_room(size):
            raise LanesFull("too many long texts wait for the tokenizer")
        async with self._turns.turn(size):
            return await self._answer(work)

    def close(self) -> None:
        """End the process, whatever it is doing."""
        if self._idle is not None:
            self._idle.cancel()
            self._idle = None
        process, self._process = self._process, None
        if process is not None and process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()

    async def _answer(self, work: TextWork) -> list[int]:
        if self._idle is not None:
            self._idle.cancel()
            self._idle = None
        is_done = False
        seconds = TEMPLATE_SECONDS if self._is_for_templates else SECONDS
        field, what = ("chat_template", "run") if self._is_for_templates else (None, "tokenise")
        try:
            async with asyncio.timeout(seconds):
                try:
                    answer = await self._asked(work)
                except (asyncio.IncompleteReadError, ConnectionError):
                    # The text may be innocent of it: somebody ended the process, or the kernel, for memory.
                    self.close()
                    answer = await self._asked(work)
            is_done = True
        except TimeoutError:
            message = f"{field or work.name} takes longer than {seconds:g} s to {what}: it is given up"
            raise TextRefused(message, "text_too_hard", field) from None
        except (asyncio.IncompleteReadError, ConnectionError):
            message = f"{field or work.name} takes too much memory to {what}"
            raise TextRefused(message, "text_too_hard", field) from None
        finally:
            if self._ends_after_each or not is_done:
                self.close()
            else:
                self._idle = asyncio.get_running_loop().call_later(IDLE_SECONDS, self.close)
        if isinstance(answer, Refused):
            raise TextRefused(answer.message, answer.code, answer.field)
        return array.array("i", answer.ids).tolist()

    async def _asked(self, work: TextWork) -> Answer:
        if self._process is None or self._process.returncode is not None:
            self._process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", f"{__package__}.worker"),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                start_new_session=True,
            )
            self._send(self._process, self._start)
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        self._send(process, work)
        await process.stdin.drain()
        [length] = LENGTH.unpack(await process.stdout.readexactly(LENGTH.size))
        answer: Answer = msgspec.msgpack.decode(await process.stdout.readexactly(length), type=Answer)
        return answer

    @staticmethod
    def _send(process: asyncio.subprocess.Process, message: msgspec.Struct) -> None:
        assert process.stdin is not None
        frame = msgspec.msgpack.encode(message)
        process.stdin.write(LENGTH.pack(len(frame)))
        process.stdin.write(frame)


def size_of(given: str | Conversation) -> int:
    """Characters of a text, or of all texts in a conversation."""
    if isinstance(given, str):
        return len(given)
    size = 0
    left: list[Any] = [given.messages, given.tools, given.variables]
    while left:
        each = left.pop()
        if isinstance(each, str):
            size += len(each)
        elif isinstance(each, dict):
            size += sum(map(len, each))
            left.extend(each.values())
        elif isinstance(each, list):
            size += len(each)
            left.extend(each)
    return size
