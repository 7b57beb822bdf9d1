"""How much of its time the device spends idle, as the driver sees it."""

from __future__ import annotations

import threading
import time

import torch

EVERY = 0.5
"""Seconds between two readings; the driver averages over about as long."""


class UtilizationClock:
    """Asks the driver in a thread of its own: an answer can take longer than a step."""

    def __init__(self, device: torch.device) -> None:
        self.idle_share = 1.0
        """Of the driver's last interval."""
        self._device = device
        threading.Thread(target=self._watch, name="ostinato-utilization", daemon=True).start()

    @staticmethod
    def of(device: torch.device) -> UtilizationClock | None:
        """For a GPU whose driver can be asked; that needs the package nvidia-ml-py."""
        if device.type != "cuda":
            return None
        try:
            torch.cuda.utilization(device)
        except (ModuleNotFoundError, RuntimeError):
            return None
        return UtilizationClock(device)

    def _watch(self) -> None:
        while True:
            self.idle_share = 1.0 - torch.cuda.utilization(self._device) / 100
            time.sleep(EVERY)
