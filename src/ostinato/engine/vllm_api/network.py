"""Addresses through which processes meet, as vLLM's trainers call them."""

from __future__ import annotations

import os
import socket


def get_ip() -> str:
    """This machine's address for others: VLLM_HOST_IP, otherwise the one it would use to reach the
    internet."""
    if given := os.environ.get("VLLM_HOST_IP"):
        return given
    for family, anybody in ((socket.AF_INET, "192.0.2.1"), (socket.AF_INET6, "2001:db8::1")):
        # Nothing is sent: connecting a datagram socket only chooses a route.
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            try:
                probe.connect((anybody, 80))
            except OSError:
                continue
            address: str = probe.getsockname()[0]
            return address
    return "127.0.0.1"


def get_open_port() -> int:
    """A port that is free now: VLLM_PORT or the next free one after it, if it is set."""
    wanted = int(os.environ.get("VLLM_PORT", "0"))
    while True:
        with socket.socket() as probe:
            try:
                probe.bind(("", wanted))
            except OSError:
                if wanted == 0:
                    raise
                wanted += 1
                continue
            port: int = probe.getsockname()[1]
            return port
