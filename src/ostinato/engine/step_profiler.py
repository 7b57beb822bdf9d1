"""torch's profiler around the steps of an engine: `LLM.start_profile`, and `/start_profile` of the server."""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass
from pathlib import Path
from weakref import finalize

import torch

logger = logging.getLogger("ostinato.engine")


@dataclass
class _Profile:
    """A profile in progress."""

    trace: torch.profiler.profile
    file: Path
    delay: int
    """Steps to skip before it begins."""
    most: int
    """Steps still to be recorded; 0: all until `stop`."""
    is_recording: bool = False

    def begin(self) -> None:
        self.trace.start()
        self.is_recording = True
        self.thread = threading.get_ident()

    def end(self) -> None:
        self.trace.stop()
        self.trace.export_chrome_trace(str(self.file))
        self.is_recording = False

    def left(self) -> None:
        """Nobody will end it: a process in which torch still records crashes at its exit."""
        if self.is_recording and self.thread == threading.get_ident():  # no other can
            self.end()
            logger.warning("the profile was not stopped: it is in %s", self.file)


class StepProfiler:
    """At most one profile at a time; the trace opens in Perfetto or chrome://tracing."""

    def __init__(self) -> None:
        self._running: _Profile | None = None

    def start(self, file: str, *, delay: int = 0, most: int = 0) -> str:
        """Begin a profile that `stop` writes to `file`.

        Skips `delay` steps and then records `most` (0: all until `stop`): call `stepped` after each.
        """
        if self._running is not None:
            raise RuntimeError(f"a profile is already running, for {self._running.file}: stop it first")
        path = Path(file)
        path.parent.mkdir(parents=True, exist_ok=True)
        kinds = [torch.profiler.ProfilerActivity.CPU]
        if torch.cuda.is_available():
            kinds.append(torch.profiler.ProfilerActivity.CUDA)
        profile = _Profile(torch.profiler.profile(activities=kinds), path, delay, most)
        if not delay:
            profile.begin()
        self._running = profile
        self._end = finalize(self, profile.left)
        return str(path)

    def stepped(self) -> None:
        """Note that a step is done; only needed for profiles with a delay or a limit."""
        profile = self._running
        if profile is None:
            return
        if profile.delay:
            profile.delay -= 1
            if not profile.delay:
                profile.begin()
        elif profile.most and profile.is_recording:
            profile.most -= 1
            if not profile.most:
                profile.end()

    def stop(self) -> str:
        """End the profile and write it to its file."""
        if self._running is None:
            raise RuntimeError("no profile is running: start one first")
        profile, self._running = self._running, None
        self._end.detach()
        if profile.delay:
            raise RuntimeError(f"the profile never began: {profile.delay} steps of its delay were left")
        if profile.is_recording:
            profile.end()
        return str(profile.file)

    def close(self) -> None:
        """End and write a profile that nobody has stopped; the engine is closed."""
        if self._running is not None:
            self._running = None
            self._end()
