"""All grammars of an engine: their queue, their processes, their limits, and which of them is to blame.

Note [Blame]
Every grammar has its own process, so whatever ends it was caused by its grammar or from outside (a signal,
lack of memory). One death while compiling is forgiven, a second is not; nor is exceeding the time limit.
While texts are followed the process notes which one it works on: a text over which it died or hung twice has
failed, and the second such text condemns the grammar. All other texts under the grammar begin again in
another process, with all their tokens so far, and continue as if nothing had happened. A condemned grammar is
refused for some minutes.
"""

from __future__ import annotations

import json
import logging
import select
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence

from ostinato.text.errors import GrammarError
from ostinato.text.grammar import mask_words
from ostinato.text.structured import StructuredOutputs

from .compile_queue import CompileQueue
from .followed_text import FollowedText, GrammarEntry, Standing
from .limits import MAX_SPECIFICATION_BYTES, GrammarLimits
from .nursery_link import NurseryLink
from .patience import Patience
from .process import GrammarProcess

logger = logging.getLogger("ostinato.grammars")

_FORGET_SECONDS = 300.0
_MOST_CONDEMNED = 512
_MOST_DEATHS = 3
_MOST_CULPRITS = 2
_MOST_NURSERIES = 3
_MOST_IDLE = 32
_SOON = 0.1
"""Seconds: a process that no text needs any more is not kept if it has owed an answer for longer."""


class GrammarHost:
    """Starts a process with the first grammar. Not thread-safe; never waits longer than its limits."""

    def __init__(self, pack_vocabulary: Callable[[], int], vocab_size: int, limits: GrammarLimits) -> None:
        """`pack_vocabulary`: makes the file as `nursery.pack_vocabulary` does; called in a thread."""
        self._pack = pack_vocabulary
        self._words = mask_words(vocab_size)
        self.limits = limits
        self._entries: OrderedDict[bytes, GrammarEntry] = OrderedDict()
        """The least recently used first."""
        self._queue = CompileQueue()
        self._live: set[GrammarEntry] = set()
        """Entries with a process."""
        self._compiling: set[GrammarEntry] = set()
        self._condemned: OrderedDict[bytes, tuple[float, str]] = OrderedDict()
        self._changed: set[FollowedText] = set()
        self._nursery: NurseryLink | None = None
        self._num_failed_nurseries = 0
        self._patience = Patience()

    # -- texts -------------------------------------------------------------------------------------

    def text(self, wanted: StructuredOutputs, tenant: str = "") -> FollowedText:
        """A text of a tenant under a grammar. Raises GrammarError if the grammar is known to be unusable."""
        specification = _specification(wanted)
        since, reason = self._condemned.get(specification, (0.0, ""))
        if reason and time.monotonic() - since < _FORGET_SECONDS:
            raise GrammarError(reason)
        entry = self._entries.get(specification) or GrammarEntry(specification)
        return FollowedText(self, entry, tenant)

    def warm_up(self) -> None:
        """Get ready before the first grammar arrives."""
        if self._nursery is None:
            self._nursery = NurseryLink(self._pack)

    def join(self, text: FollowedText) -> None:
        """A text needs its grammar."""
        entry = self._entries.setdefault(text.entry.specification, text.entry)
        self._entries.move_to_end(entry.specification)
        text.entry = entry
        entry.texts.add(text)
        if entry.process is None:
            self._queue.add(entry, [text.tenant])
        self._begin_compiling()

    def leave(self, text: FollowedText) -> None:
        """A text no longer needs its grammar."""
        entry = text.entry
        if text not in entry.texts:
            return
        text.release_slot()
        entry.texts.remove(text)
        self._changed.discard(text)
        if entry.texts:
            return
        process = entry.process
        if process is not None and entry.is_ready and not process.is_late(_SOON):
            self._entries.move_to_end(entry.specification)
            self._forget_idle()
        else:
            self._drop(entry)

    # -- what the processes do ---------------------------------------------------------------------

    def attend(self, seconds: float = 0.0) -> list[FollowedText]:
        """Process the results of compiling and of late texts; wait up to `seconds` for one.

        Returns the parked texts whose state may have changed.
        """
        self._begin_compiling()
        if not self._changed:
            self._wait(self._awaited_entries(), seconds)
            self._begin_compiling()
        changed, self._changed = list(self._changed), set()
        return changed

    def note(self, text: FollowedText) -> None:
        """Report this text with the next `attend`, in any case."""
        self._changed.add(text)

    def send(self, texts: Iterable[FollowedText]) -> None:
        """Send the questions about these texts, so that processes work on them in the meantime."""
        for entry in {text.entry for text in texts}:
            if entry.process is not None:
                entry.process.flush()

    def settle(self, texts: Sequence[FollowedText]) -> None:
        """Wait for the answers to these texts' questions, as long as patience lasts."""
        began = time.monotonic()
        patience = self._patience.now()
        while True:
            entries = {text.entry for text in texts if text.standing is Standing.ASKED}
            left = began + patience - time.monotonic()
            if not entries:
                break
            self._wait(entries, max(0.0, left))
            if left <= 0:
                break
        self._patience.spend(time.monotonic() - began)

    def _awaited_entries(self) -> set[GrammarEntry]:
        asked = {entry for entry in self._live if entry.process is not None and entry.process.is_asked}
        return asked | self._compiling

    def _wait(self, entries: Iterable[GrammarEntry], seconds: float) -> None:
        """Wait until one of them, or the nursery, has answered."""
        poller, processes = select.poll(), {}
        for entry in entries:
            if (process := entry.process) is not None:
                process.flush()
                processes[process.descriptor] = entry
                poller.register(process.descriptor, select.POLLIN)
        if (control := self._nursery_descriptor) is not None:
            poller.register(control, select.POLLIN)
        heard = {descriptor for descriptor, _ in poller.poll(1000 * seconds)} if seconds or processes else ()
        if self._nursery is not None:
            self._attend_nursery(self._nursery)
        for descriptor, entry in processes.items():
            if entry.process is not None:
                self._look_after(entry, entry.process, has_news=descriptor in heard)

    @property
    def _nursery_descriptor(self) -> int | None:
        """The nursery's descriptor, if something is expected from it."""
        return None if self._nursery is None else self._nursery.descriptor

    def _look_after(self, entry: GrammarEntry, process: GrammarProcess, *, has_news: bool) -> None:
        if has_news:
            process.receive()
            self._changed.update(text for text in entry.texts if text.is_parked)
        if entry in self._compiling:
            self._look_after_compiling(entry, process)
        elif process.is_dead:
            self._lost(entry, "ended the process that follows it")
        elif process.is_late(self.limits.mask_seconds):
            self._lost(entry, f"takes longer than {self.limits.mask_seconds:g} s to say what may come next")

    def _look_after_compiling(self, entry: GrammarEntry, process: GrammarProcess) -> None:
        outcome = process.outcome
        if outcome is not None:
            self._compiling.remove(entry)
            self._num_failed_nurseries = 0
            if "error" in outcome:
                self._refuse(entry, f"this cannot be followed: {outcome['error']}")
        elif process.is_dead:
            self._lost(entry, "ended the process that compiles it")
        elif process.is_born and time.monotonic() - process.waits_since > self.limits.compile_seconds:
            reason = f"takes longer than {self.limits.compile_seconds:g} s to compile"
            self._condemn(entry, f"this cannot be followed: the grammar {reason}")

    # -- the queue ---------------------------------------------------------------------------------

    def _begin_compiling(self) -> None:
        while len(self._queue) and (entry := self._next()) is not None:
            self.warm_up()
            nursery = self._nursery
            assert nursery is not None
            self._attend_nursery(nursery)
            if self._nursery is not nursery or not nursery.is_ready:
                return
            try:
                entry.process = GrammarProcess(entry.specification, self._words)
            except OSError as error:  # out of descriptors or memory
                logger.warning("cannot start a process for a grammar: %s", error)
                if not self._live:
                    self._fail(entry, f"cannot start a process for a grammar: {error}", is_at_fault=False)
                return
            self._queue.remove(entry)
            self._live.add(entry)
            self._compiling.add(entry)
            nursery.spawn(entry.process, self.limits)

    def _next(self) -> GrammarEntry | None:
        """Returns the grammar to be compiled next; None: there is no room.

        A tenant may take all room while nobody else waits. Beyond the limits, up to twice as many, there is
        room for one grammar at a time of a tenant that has none being compiled and few in use.
        """
        compiling = Counter(tenant for entry in self._compiling for tenant in entry.tenants)
        tenant, entry = self._queue.next(compiling)
        most_compiling, most_live = self.limits.compiling, self.limits.processes
        used = [each for each in self._live if each.texts]
        if len(self._compiling) < most_compiling and len(used) < most_live:
            return entry
        own = sum(1 for each in used if tenant in each.tenants)
        is_late_guest = not compiling[tenant] and 2 * own < most_live
        has_place = len(self._compiling) < 2 * most_compiling and len(used) < 2 * most_live
        return entry if is_late_guest and has_place else None

    def _attend_nursery(self, nursery: NurseryLink) -> None:
        nursery.attend()
        if nursery.error is None:
            return
        # Everything that it has forked dies with it; no grammar is to blame.
        logger.warning("%s", nursery.error)
        nursery.close()
        self._nursery = None
        self._num_failed_nurseries += 1
        for entry in list(self._live):
            self._drop_process(entry)
            self._queue_again(entry)
        if nursery.is_hopeless or self._num_failed_nurseries >= _MOST_NURSERIES:
            self._num_failed_nurseries = 0
            for entry in list(self._queue):
                self._fail(entry, nursery.error, is_at_fault=nursery.is_hopeless)

    def _queue_again(self, entry: GrammarEntry) -> None:
        if not entry.texts:
            self._drop(entry)
        else:
            self._queue.add(entry, entry.tenants, first=True)

    # -- blame -------------------------------------------------------------------------------------

    def _lost(self, entry: GrammarEntry, reason: str) -> None:
        """Its process has died or hangs: see Note [Blame]."""
        logger.warning("a grammar %s: %s", reason, entry.specification[:200])
        is_compiling, culprit = not entry.is_ready, entry.culprit
        self._drop_process(entry)
        entry.num_deaths += 1
        if culprit is not None and not is_compiling:
            culprit.strikes += 1
            if culprit.strikes > 1:
                entry.num_culprits += 1
                culprit.fail(f"this cannot be followed: the grammar {reason}")
                self._changed.add(culprit)
        most = 2 if is_compiling else _MOST_DEATHS
        if entry.num_deaths >= most or entry.num_culprits >= _MOST_CULPRITS:
            self._condemn(entry, f"this cannot be followed: the grammar {reason}")
        else:
            self._queue_again(entry)

    def _condemn(self, entry: GrammarEntry, error: str) -> None:
        """Refuse it now and for some minutes."""
        self._condemned[entry.specification] = time.monotonic(), error
        while len(self._condemned) > _MOST_CONDEMNED:
            self._condemned.popitem(last=False)
        self._refuse(entry, error)

    def _refuse(self, entry: GrammarEntry, error: str) -> None:
        self._fail(entry, error, is_at_fault=True)

    def _fail(self, entry: GrammarEntry, error: str, *, is_at_fault: bool) -> None:
        for text in entry.texts:
            text.fail(error, is_at_fault=is_at_fault)
        self._changed.update(entry.texts)
        self._drop(entry)

    # -- memory ------------------------------------------------------------------------------------

    def _forget_idle(self) -> None:
        """Drop unused grammars, the least recently used first, until the rest fit."""
        idle = [entry for entry in self._entries.values() if entry in self._live and not entry.texts]
        taken, limit = sum(entry.num_bytes for entry in idle), self.limits.idle_mb * 2**20
        for at, entry in enumerate(idle):
            if taken <= limit and len(idle) - at <= _MOST_IDLE:
                return
            taken -= entry.num_bytes
            self._drop(entry)

    def _drop(self, entry: GrammarEntry) -> None:
        self._drop_process(entry)
        self._entries.pop(entry.specification, None)
        if entry in self._queue:
            self._queue.remove(entry)

    def _drop_process(self, entry: GrammarEntry) -> None:
        entry.drop_process()
        self._live.discard(entry)
        self._compiling.discard(entry)

    def close(self) -> None:
        """End all processes."""
        for entry in list(self._entries.values()):
            self._drop(entry)
        if self._nursery is not None:
            self._nursery.close()
            self._nursery = None


def _specification(wanted: StructuredOutputs) -> bytes:
    kind, text = wanted.kind_and_text
    try:
        found = json.dumps({"kind": kind, "text": text}, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise GrammarError(f"{kind} contains half of a surrogate pair, which is not a character") from None
    if len(found) > MAX_SPECIFICATION_BYTES:
        raise GrammarError(
            f"{kind} has {len(text):,} characters: at most {MAX_SPECIFICATION_BYTES:,} bytes are allowed"
        )
    return found
