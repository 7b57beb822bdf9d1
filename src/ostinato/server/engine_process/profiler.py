"""torch's profiler around the steps between `/start_profile` and `/stop_profile`."""

from __future__ import annotations

from pathlib import Path

import torch


class StepProfiler:
    """At most one profile at a time; the trace opens in Perfetto or chrome://tracing."""

    def __init__(self) -> None:
        self._running: tuple[torch.profiler.profile, Path] | None = None

    def start(self, file: str) -> str:
        """Begin a profile that `stop` will write to `file`."""
        if self._running is not None:
            raise RuntimeError(f"a profile is being taken already, for {self._running[1]}: stop it first")
        path = Path(file)
        path.parent.mkdir(parents=True, exist_ok=True)
        kinds = [torch.profiler.ProfilerActivity.CPU]
        if torch.cuda.is_available():
            kinds.append(torch.profiler.ProfilerActivity.CUDA)
        profile = torch.profiler.profile(activities=kinds)
        profile.start()
        self._running = profile, path
        return str(path)

    def stop(self) -> str:
        """End the profile and write it."""
        if self._running is None:
            raise RuntimeError("no profile is being taken: start one first")
        (profile, path), self._running = self._running, None
        profile.stop()
        profile.export_chrome_trace(str(path))
        return str(path)
