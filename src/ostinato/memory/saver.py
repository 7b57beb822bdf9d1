"""`MemorySaver`: releases memory while it is not needed, and restores it at the same addresses."""

from __future__ import annotations

import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from .blocks import TAGS, Backup, Block, Content, Kind, Mappings, Tag
from .errors import SaverError
from .host_mappings import HostMappings
from .reports import Held, Paused, Resumed

HOSTILE = 0x7FFF_7FFF
"""NaN in every floating type, and large in every integer type."""

Rewrite = Callable[[], object]


class MemorySaver:
    """Memory of one device, by tag. Tensors and captured graphs stay valid through `pause` and `resume`.

    Every method may be called from any thread. A call that fails leaves everything as it was, and can be
    repeated. While a tag is paused, its tensors must not be used, but may be freed.
    """

    def __init__(self, device: torch.device | str = "cuda", *, hostile: bool = False) -> None:
        """`hostile`: at every resume, fill all memory with NaNs and large integers before restoring its
        contents, so that contents in the wrong class are noticed."""
        self.hostile = hostile
        self._mappings = _mappings_for(torch.device(device))
        self._lock = threading.RLock()
        self._asleep: set[Tag] = set()
        self._lost: set[Tag] = set()
        self._open_regions: Counter[Tag] = Counter()
        self._backups: dict[int, Backup] = {}
        self._saved: set[int] = set()
        """Serials of blocks whose contents are in their backups."""
        self._rewrites: list[tuple[Tag, Rewrite]] = []
        self.is_closed = False
        """Whether it was closed."""

    @property
    def device(self) -> torch.device:
        """The device whose memory this is."""
        return self._mappings.device

    # -- allocating --------------------------------------------------------------------------------

    @contextmanager
    def region(self, tag: Tag, content: Content | str = Content.DATA) -> Iterator[None]:
        """A context in which allocations of this thread on the device get this tag and class of contents."""
        kind = _kind(tag, content)
        with self._staying_awake(tag), self._mappings.region(kind):
            yield

    def empty(
        self, shape: Sequence[int], dtype: torch.dtype, tag: Tag, content: Content | str = Content.DATA
    ) -> torch.Tensor:
        """A tensor with undefined contents."""
        kind = _kind(tag, content)
        with self._staying_awake(tag):
            memory = self._mappings.allocate(math.prod(shape) * dtype.itemsize, kind)
        return memory.view(dtype).view(tuple(shape))

    def graph_pool(self, tag: Tag = "graphs", content: Content | str = Content.SCRATCH) -> Any:
        """A new pool for `torch.cuda.graph(pool=...)`. Captures to it must end before its tag is paused."""
        kind = _kind(tag, content)
        with self._lock:
            self._refuse_if_closed()
            if tag in self._asleep:
                raise SaverError(f"{tag} is paused: resume it before capturing there")
            return self._mappings.graph_pool(kind)

    def drop_graph_pool(self, pool: Any) -> bool:
        """Drop a pool unless a graph lives in it. Returns whether it was dropped."""
        with self._lock:
            return self.is_closed or self._mappings.drop_graph_pool(pool)

    @contextmanager
    def _staying_awake(self, tag: Tag) -> Iterator[None]:
        with self._lock:
            self._refuse_if_closed()
            if tag in self._asleep:
                raise SaverError(f"{tag} is paused: resume it before allocating there")
            self._open_regions[tag] += 1
        try:
            yield
        finally:
            with self._lock:
                self._open_regions[tag] -= 1

    def on_resume(self, tag: Tag, rewrite: Rewrite) -> None:
        """Call `rewrite` whenever the memory and the saved contents of the tag have been restored, to write
        contents that were not saved. Other tags that the same call resumes may not be restored yet.

        If it raises, the resume ends and the tag stays paused.
        """
        _kind(tag, Content.DATA)
        with self._lock:
            self._rewrites.append((tag, rewrite))

    # -- releasing and taking back -----------------------------------------------------------------

    def pause(self, tags: Iterable[Tag] | None = None, *, backup: bool = True) -> Paused:
        """Release the memory of these tags (default: all) after saving its contents.

        With `backup=False`, contents of class *data* are not saved but lost. Tags that are already paused
        stay as they are.
        """
        with self._lock:
            asked = self._checked(tags)
            self._release_what_is_left([tag for tag in asked if tag in self._asleep])
            awake = [tag for tag in asked if tag not in self._asleep]
            for tag in awake:
                if self._open_regions[tag]:
                    raise SaverError(f"{tag} cannot be paused while regions of it are open: leave them first")
            kinds = _kinds_of(awake)
            if not kinds:
                return Paused()
            clock = _Clock()
            with self._mappings.hold(kinds):
                self._mappings.synchronize()
                clock.lap("wait")
                blocks = [block for block in self._mappings.blocks(kinds) if block.is_mapped]
                saved = [block for block in blocks if _is_saved(block.kind.content, backup)]
                self._forget_backups_but(saved, kinds)
                self._make_room_for(saved)
                clock.lap("room")
                self._mappings.copy_out(saved, self._backups)
                clock.lap("copy")
                # True from the first block that is released on; `resume` restores what was released.
                self._saved |= {block.serial for block in saved}
                self._asleep |= set(awake)
                self._lost |= {block.kind.tag for block in blocks if block.kind.content is Content.DATA} - {
                    block.kind.tag for block in saved if block.kind.content is Content.DATA
                }
                self._mappings.unmap(kinds)
                clock.lap("release")
            released, backed_up = (sum(block.size for block in each) for each in (blocks, saved))
            return Paused(tuple(awake), released, backed_up, clock.seconds)

    def _release_what_is_left(self, asleep: Sequence[Tag]) -> None:
        """Finish a pause that failed or was interrupted after contents had been saved."""
        kinds = _kinds_of(asleep)
        if any(block.is_mapped for block in self._mappings.blocks(kinds)):
            with self._mappings.hold(kinds):
                self._mappings.unmap(kinds)

    def resume(self, tags: Iterable[Tag] | None = None) -> Resumed:
        """Allocate memory for these tags (default: all) at their old addresses, and restore saved contents.

        Raises SaverMemoryError if there is not enough memory; the tags then stay paused.
        """
        with self._lock:
            asleep = [tag for tag in self._checked(tags) if tag in self._asleep]
            kinds = _kinds_of(asleep)
            if not kinds:
                return Resumed()
            clock = _Clock()
            with self._mappings.hold(kinds):
                before = self._mappings.blocks(kinds)
                restored = [block for block in before if block.serial in self._saved]
                try:
                    self._take_back(before, restored, asleep, clock)
                except BaseException:
                    self._mappings.unmap(kinds)
                    raise
                self._asleep -= set(asleep)
                self._saved -= {block.serial for block in restored}
                if not self._mappings.keeps_backups:
                    self._forget_backups_but((), kinds)
            lost = tuple(tag for tag in asleep if tag in self._lost)
            self._lost -= set(lost)
            taken = sum(block.size for block in before if not block.is_mapped)
            back = sum(block.size for block in restored)
            return Resumed(tuple(asleep), taken, back, lost, clock.seconds)

    def _take_back(
        self, blocks: Sequence[Block], restored: Sequence[Block], tags: Sequence[Tag], clock: _Clock
    ) -> None:
        """Restore memory and contents. Copies start as soon as their own memory exists; the remaining memory
        is allocated, and contents that are not copied are written, while they run."""
        kinds, copied = _kinds_of(tags), {block.kind for block in restored}
        at_once = self.hostile or not self._mappings.has_room_for(blocks)
        first = [kind for kind in kinds if at_once or kind in copied]
        self._mappings.map(first)
        clock.lap("take")
        if self.hostile:
            self._mappings.fill(blocks, HOSTILE)
        with self._mappings.copying_in(restored, self._backups):
            clock.lap("copy")
            self._mappings.map([kind for kind in kinds if kind not in first])
            clock.lap("take")
            waiting = {kind.tag for kind in copied}
            self._rewrite([tag for tag in tags if tag not in waiting])
            clock.lap("rewrite")
        clock.lap("copy")
        self._rewrite([tag for tag in tags if tag in waiting])
        self._mappings.synchronize()
        clock.lap("rewrite")

    def _rewrite(self, tags: Sequence[Tag]) -> None:
        for tag, rewrite in self._rewrites:
            if tag in tags:
                rewrite()

    # -- backups -----------------------------------------------------------------------------------

    def prepare_backup(self, tags: Iterable[Tag] | None = None) -> int:
        """Make backups ahead of the first pause, which then takes less time. Returns their bytes."""
        with self._lock:
            kinds = _kinds_of([tag for tag in self._checked(tags) if tag not in self._asleep])
            with self._mappings.hold(kinds):
                blocks = self._mappings.blocks(kinds)
                self._make_room_for([block for block in blocks if _is_saved(block.kind.content, True)])
            return sum(backup.nbytes for backup in self._backups.values())

    def drop_backups(self) -> None:
        """Free unused backups on the host. The next pause makes them again, which takes a while."""
        with self._lock:
            for serial in set(self._backups) - self._saved:
                self._backups.pop(serial).free()

    def _make_room_for(self, blocks: Sequence[Block]) -> None:
        self._backups |= self._mappings.make_backups([b for b in blocks if b.serial not in self._backups])

    def _forget_backups_but(self, wanted: Sequence[Block], kinds: Sequence[Kind]) -> None:
        """Free the backups of blocks of these kinds, and of blocks that no longer exist, except `wanted`."""
        kept = {block.serial for block in wanted}
        kept |= {block.serial for block in self._mappings.blocks(_ALL) if block.kind not in kinds}
        for serial in set(self._backups) - kept:
            self._backups.pop(serial).free()
            self._saved.discard(serial)

    # -- questions ---------------------------------------------------------------------------------

    def is_paused(self, tag: Tag) -> bool:
        """Whether the memory of a tag is released."""
        _kind(tag, Content.DATA)
        return tag in self._asleep

    @property
    def paused(self) -> tuple[Tag, ...]:
        """The tags whose memory is released."""
        return tuple(tag for tag in TAGS if tag in self._asleep)

    def kind_of(self, tensor: torch.Tensor) -> tuple[Tag, Content] | None:
        """Tag and class of contents of a tensor; None if its memory is not from this saver."""
        address = tensor.data_ptr()
        for block in self._mappings.blocks(_ALL):
            if block.address <= address < block.address + block.size:
                return block.kind.tag, block.kind.content
        return None

    def bytes(self) -> dict[Tag, dict[Content, Held]]:
        """Bytes held, by tag and class of contents, in whole pages of the device."""
        with self._lock:
            found: dict[Tag, dict[Content, Held]] = {tag: {} for tag in TAGS}
            for block in self._mappings.blocks(_ALL):
                of = found[block.kind.tag]
                held = of.get(block.kind.content, Held())
                backup = self._backups.get(block.serial)
                of[block.kind.content] = Held(
                    held.mapped + block.size * block.is_mapped,
                    held.released + block.size * (not block.is_mapped),
                    held.backup + (0 if backup is None else backup.nbytes),
                )
            return found

    def close(self) -> None:
        """Refuse further allocations and free all backups. Memory is freed with its tensors and graphs."""
        with self._lock:
            if self.is_closed:
                return
            self.is_closed = True
            for backup in self._backups.values():
                backup.free()
            self._backups.clear()
            self._saved.clear()
            self._rewrites.clear()
            self._mappings.close()

    def _checked(self, tags: Iterable[Tag] | None) -> list[Tag]:
        self._refuse_if_closed()
        if isinstance(tags, str):
            raise SaverError(f"tags must be a list, not {tags!r}: use [{tags!r}]")
        asked = TAGS if tags is None else tuple(tags)
        for tag in asked:
            _kind(tag, Content.DATA)
        return [tag for tag in TAGS if tag in asked]

    def _refuse_if_closed(self) -> None:
        if self.is_closed:
            raise SaverError("this memory saver is closed")


class _Clock:
    """Seconds from lap to lap, added up by name."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = time.perf_counter()

    def lap(self, name: str) -> None:
        now = time.perf_counter()
        self.seconds[name] = self.seconds.get(name, 0.0) + now - self._last
        self._last = now


def _mappings_for(device: torch.device) -> Mappings:
    if device.type == "cpu":
        return HostMappings()
    if device.type == "cuda":
        from .cuda_mappings import CudaMappings

        return CudaMappings(device)
    raise SaverError(f"a memory saver cannot manage memory of {device}: use cuda or cpu")


def _kind(tag: Tag, content: Content | str) -> Kind:
    if tag not in TAGS:
        raise SaverError(f"unknown tag {tag!r}: use {', '.join(TAGS)}")
    try:
        return Kind(tag, Content(content))
    except ValueError:
        names = ", ".join(each.value for each in Content)
        raise SaverError(f"unknown class of contents {content!r}: use {names}") from None


def _kinds_of(tags: Sequence[Tag]) -> list[Kind]:
    return [Kind(tag, content) for tag in tags for content in Content]


_ALL = _kinds_of(TAGS)


def _is_saved(content: Content, backup: bool) -> bool:
    return content is Content.ONCE or (content is Content.DATA and backup)
