"""The engine's end of the process of one grammar: commands out, verdicts in, never waiting."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import time
from collections import deque
from typing import Any, Protocol

import numpy as np

from .layout import CURRENT, NUM_SLOTS, PACKET_BYTES, Command, SharedMemory, Verdict

_VERDICTS = frozenset(Verdict)
_ON_THE_WAY = -1
"""Number of a question whose answer is not needed."""


class Asking(Protocol):
    """A text, as its process sees it."""

    def told(self, question: int, verdict: Verdict) -> None:
        """Receives the answer to the question with this number."""


class GrammarProcess:
    """The process of a grammar, from the request for it until its death."""

    def __init__(self, specification: bytes, words: int) -> None:
        self._channel, self._theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._channel.setblocking(False)
        self._memory_descriptor = os.memfd_create("ostinato-masks", os.MFD_CLOEXEC)
        try:
            os.ftruncate(self._memory_descriptor, SharedMemory.size(words))
            self.memory = SharedMemory(self._memory_descriptor, words)
        except OSError:
            os.close(self._memory_descriptor)
            raise
        self.memory.write_specification(specification)
        self.outcome: dict[str, Any] | None = None
        """The outcome of compiling; None before."""
        self.is_born = False
        """Whether it has begun to compile."""
        self.is_dead = False
        """Whether it has ended by itself."""
        self._handle: int | None = None
        self._is_unwanted = False
        self._free_slots = list(range(NUM_SLOTS - 1, -1, -1))
        self._in_slots: dict[int, Asking] = {}
        self._awaited: deque[tuple[Asking, int]] = deque()
        self._num_answered = 0
        self._words: list[int] = []
        self._outbox: deque[bytes] = deque()
        self.waits_since = time.monotonic()
        """When the oldest unanswered question was asked; compiling is the first."""

    # -- birth and death ---------------------------------------------------------------------------

    def hand_over(self) -> tuple[socket.socket, int]:
        """Its end of the socket and its memory; the receiver must close them."""
        return self._theirs, self._memory_descriptor

    def born(self, handle: int | None) -> None:
        """It runs, and can be killed through this handle; None: it is already dead."""
        self._handle = handle
        self.is_born, self.waits_since = True, time.monotonic()
        if self._is_unwanted:
            self.kill()

    def kill(self) -> None:
        """Kill it now, or as soon as it is born."""
        self._is_unwanted = True
        self._channel.close()
        if self._handle is not None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._handle, signal.SIGKILL)
            os.close(self._handle)
            self._handle = None

    @property
    def culprit(self) -> Asking | None:
        """The text it was working on, if that text still exists."""
        return self._in_slots.get(int(self.memory.header[CURRENT]) - 1)

    # -- commands out ------------------------------------------------------------------------------

    @property
    def descriptor(self) -> int:
        """Readable when there are verdicts."""
        return self._channel.fileno()

    @property
    def is_asked(self) -> bool:
        """Whether a verdict is due."""
        return bool(self._awaited)

    def is_late(self, seconds: float) -> bool:
        """Whether a verdict has been due for this long."""
        return self.is_asked and time.monotonic() - self.waits_since > seconds

    def start(self, text: Asking, tokens: list[int], question: int) -> int | None:
        """The slot in which a text with these tokens begins; None if all slots are taken.

        The answer comes under number `question`. A long text is several questions; once one of them is
        answered with anything but FOLLOWS, so are the following ones.
        """
        if not self._free_slots:
            return None
        slot = self._free_slots.pop()
        self._in_slots[slot] = text
        most = PACKET_BYTES // 8
        begins = [*range(0, len(tokens), most)] or [0]
        for begin in begins:
            command = Command.ACCEPT if begin else Command.START
            number = question if begin == begins[-1] else _ON_THE_WAY
            self._ask(text, number, command, slot, tokens[begin : begin + most])
        return slot

    def accept(self, text: Asking, slot: int, token: int, question: int) -> None:
        """Continue the text in a slot."""
        self._ask(text, question, Command.ACCEPT, slot, [token])

    def free(self, slot: int) -> None:
        """End the text in a slot."""
        self._add([Command.FREE, slot, 0])
        del self._in_slots[slot]
        self._free_slots.append(slot)

    def _ask(self, text: Asking, question: int, command: Command, slot: int, tokens: list[int]) -> None:
        if not self._awaited:
            self.waits_since = time.monotonic()
        self._awaited.append((text, question))
        self._add([command, slot, len(tokens), *tokens])

    def _add(self, words: list[int]) -> None:
        if 4 * (len(self._words) + len(words)) > PACKET_BYTES:
            self._seal()
        self._words += words

    def _seal(self) -> None:
        if self._words:
            # Taken first, here and below: a loss by an interrupt is noticed, sending twice is not.
            words, self._words = self._words, []
            self._outbox.append(np.array(words, dtype=np.int32).tobytes())

    def flush(self) -> None:
        """Send the questions, as far as the socket takes them."""
        self._seal()
        while self._outbox and not self.is_dead:
            packet = self._outbox.popleft()
            try:
                self._channel.send(packet)
            except BlockingIOError:
                self._outbox.appendleft(packet)
                return
            except OSError:
                self.is_dead = True

    # -- verdicts in -------------------------------------------------------------------------------

    def receive(self) -> None:
        """Process everything that it has answered."""
        while not self.is_dead:
            try:
                packet = self._channel.recv(2 * PACKET_BYTES)
            except BlockingIOError:
                return
            except OSError:
                packet = b""
            if not packet:
                self.is_dead = True
            elif self.outcome is None:
                self._take_outcome(packet)
            else:
                self._take_verdicts(packet)

    def _take_outcome(self, packet: bytes) -> None:
        try:
            self.outcome = dict(json.loads(packet))
        except ValueError:
            self.is_dead = True

    def _take_verdicts(self, packet: bytes) -> None:
        first, *verdicts = np.frombuffer(packet, dtype=np.int32).tolist()
        if first != self._num_answered:
            self.is_dead = True  # an answer was lost: later ones would be assigned to the wrong texts
            return
        for word in verdicts:
            if not self._awaited or word not in _VERDICTS:
                self.is_dead = True  # an invalid answer: its memory is corrupt
                return
            text, question = self._awaited[0]
            text.told(question, Verdict(word))
            self._awaited.popleft()
            self._num_answered += 1
        self.waits_since = time.monotonic()
