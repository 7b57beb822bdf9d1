"""What goes wrong before a server serves, or where it writes, is told in one sentence."""

import contextlib
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

from engine.trainer_process import free_port

from .server_process import SMALL


def test_a_port_in_use(model: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        command = [sys.executable, "-m", "ostinato", "serve", "--model", str(model), "--port", str(port)]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 1
    assert ended.stderr == f"ostinato: cannot listen on 127.0.0.1:{port}: Address already in use\n"


@pytest.mark.slow
def test_a_full_disk_under_the_log_and_under_profiles(model: Path) -> None:
    """A server whose log has nowhere to go serves; a profile that has nowhere to go is told in a sentence."""
    port = free_port()
    command = [sys.executable, "-m", "ostinato", "serve", "--model", str(model), "--port", str(port), *SMALL]
    command += ["--profile-dir", "/dev/full/profiles"]
    with Path("/dev/full").open("w") as full:
        process = subprocess.Popen(command, stderr=full, stdout=full)
    url = f"http://127.0.0.1:{port}"
    try:
        wait_until_healthy(url)
        body = {"prompt": "a", "max_tokens": 3, "temperature": 0}
        answer = httpx.post(f"{url}/v1/completions", json=body, timeout=30)
        assert answer.json()["choices"][0]["text"] == "bcd"
        assert httpx.post(f"{url}/v1/completions", json={"prompt": 1}).status_code == 400, "which is logged"
        for path in ("/start_profile", "/stop_profile"):
            refused = httpx.post(url + path, timeout=30)
        assert refused.status_code == 400, refused.text
        assert len(refused.json()["error"]["message"].splitlines()) == 1
        assert httpx.get(f"{url}/health").status_code == 200
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0


def wait_until_healthy(url: str) -> None:
    end = time.monotonic() + 60
    while True:
        with contextlib.suppress(httpx.TransportError):
            if httpx.get(f"{url}/health").status_code == 200:
                return
        assert time.monotonic() < end
        time.sleep(0.1)
