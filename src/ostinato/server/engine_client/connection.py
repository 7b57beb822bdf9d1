"""One life of the engine process: its sockets, its start, its end."""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import os
import secrets
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import zmq
import zmq.asyncio

from ..engine_process.main import SIGNALS, run_engine
from ..wire.messages import AdapterInfo, Command, Event, decode_event, encode


class EngineConnection:
    """The engine process and the two sockets to it. After its death, make a new one."""

    def __init__(
        self,
        options: Mapping[str, Any],
        on_event: Callable[[Event], None],
        adapters: Sequence[AdapterInfo] | None = None,
    ) -> None:
        """Start the process; `options` are the fields of `EngineConfig`, `adapters` what an engine before
        had."""
        self._folder: Path | None = None
        self._context = zmq.asyncio.Context(io_threads=1)
        self._on_event = on_event
        self._commands: zmq.Socket[bytes] = zmq.Context.shadow(self._context).socket(zmq.PUSH)
        self._events = self._context.socket(zmq.PULL)
        self._commands.setsockopt(zmq.SNDHWM, 0)
        self._events.setsockopt(zmq.RCVHWM, 0)
        addresses = self._addresses()
        self._commands.bind(addresses[0])
        self._events.bind(addresses[1])
        process = multiprocessing.get_context("spawn").Process(
            target=run_engine, args=(dict(options), *addresses, adapters), name="ostinato-engine", daemon=True
        )
        blocked_before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        try:
            process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked_before)
        self.process = process
        self._reader = asyncio.create_task(self._read())

    def _addresses(self) -> list[str]:
        """Where nobody but our own user can connect, and of which a killed process leaves nothing behind."""
        names = ("commands", "events")
        if sys.platform == "linux":
            for bound in (self._commands, self._events):
                bound.setsockopt(zmq.IPC_FILTER_UID, os.getuid())
            return [f"ipc://@ostinato-{secrets.token_hex(16)}-{name}" for name in names]
        self._folder = Path(tempfile.mkdtemp(prefix="ostinato-"))
        return [f"ipc://{self._folder}/{name}" for name in names]

    def send(self, command: Command) -> None:
        """Never waits: what a dead process does not read is thrown away with the connection."""
        # Without a process at the other end there is no queue: it has ended, and whoever waits is about to
        # hear of it.
        with contextlib.suppress(zmq.Again):
            self._commands.send(encode(command), zmq.NOBLOCK)

    async def ended(self) -> int | None:
        """Wait for the process to end; its exit code. Raises what went wrong in taking in its events."""
        loop, sentinel = asyncio.get_running_loop(), self.process.sentinel
        gone = asyncio.Event()
        loop.add_reader(sentinel, gone.set)
        waiting = asyncio.create_task(gone.wait())
        try:
            await asyncio.wait({waiting, self._reader}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            loop.remove_reader(sentinel)
            waiting.cancel()
        if not gone.is_set():
            self.process.kill()
            self._reader.result()
        self.process.join()
        return self.process.exitcode

    async def close(self) -> None:
        """Take the sockets away, and the process if it has not ended."""
        if self.process.is_alive():
            self.process.kill()
        self._reader.cancel()
        await asyncio.gather(self._reader, return_exceptions=True)
        self._commands.close(linger=0)
        self._events.close(linger=0)
        self._context.term()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    async def _read(self) -> None:
        while True:
            self._on_event(decode_event(await self._events.recv()))
