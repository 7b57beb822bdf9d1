"""A real server in a process of its own."""

import contextlib
import functools
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx
import httpx._transports.default as transports

from ostinato.server.http.probes import METRICS_SECONDS

# Else every call would load all certificates of the machine, which takes 50 ms, and no call here needs one.
transports.create_ssl_context = functools.cache(transports.create_ssl_context)

SMALL = (
    *("--max-running-requests", "16", "--num-pages", "600", "--max-model-len", "256"),
    *("--cuda-graph-bs", "4,16", "--cuda-graph-prefill-tokens", "32,128"),
)
"""Engine flags that make a start quick."""

START_SECONDS = 60


class ServerProcess:
    """`ostinato serve`, started when entered and stopped when left."""

    def __init__(
        self,
        model: Path | None,
        *flags: str,
        module: str = "ostinato",
        wait: bool = True,
        bare: bool = False,
        start_seconds: float = START_SECONDS,
    ) -> None:
        """`bare`: with these flags and no others, so that `model` has to be among them."""
        self._wait, self._start_seconds = wait, start_seconds
        command = [sys.executable, "-m", module, *(("serve",) if module == "ostinato" else ())]
        self._folder = tempfile.TemporaryDirectory()
        if not bare:
            command += ["--model", str(model), "--served-model-name", "scripted", "--port", "0"]
            command += ["--profile-dir", self._folder.name, *SMALL]
        command += flags
        self._log = Path(self._folder.name) / "log"
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
        with self._log.open("w") as log:
            self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=log, env=environment)
        self.port = 0

    @property
    def url(self) -> str:
        """Where it listens."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def log(self) -> str:
        """What it said so far."""
        return self._log.read_text()

    def __enter__(self) -> "ServerProcess":
        end = time.monotonic() + self._start_seconds
        while time.monotonic() < end and self.process.poll() is None:
            found = re.search(r"listening on http://[^:]*:(\d+)", self.log)
            if found:
                self.port = int(found[1])
                if not self._wait or "ostinato: ready" in self.log:
                    return self
            time.sleep(0.05)
        log = self.log
        self._end()
        raise AssertionError(f"the server did not start:\n{log}")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            sys.stderr.write(self.log)
        self._end()

    def _end(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(10)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        self._folder.cleanup()

    def get(self, path: str, **options: Any) -> httpx.Response:
        """A GET."""
        return httpx.get(self.url + path, timeout=30, **options)

    def post(self, path: str, body: Any = None, **options: Any) -> httpx.Response:
        """A POST of JSON."""
        return httpx.post(self.url + path, json=body, **{"timeout": 30, **options})

    def metrics(self) -> str:
        """Prometheus metrics of now: those of a moment ago are good for a while."""
        time.sleep(METRICS_SECONDS)
        return self.get("/metrics").text

    @property
    def engine_pid(self) -> int:
        """The engine process: the child that runs spawn_main."""
        for entry in Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split():
            with contextlib.suppress(OSError):  # others come and go
                if b"spawn_main" in Path(f"/proc/{entry}/cmdline").read_bytes():
                    return int(entry)
        raise AssertionError("there is no engine process")

    def engine_statistics(self) -> dict[str, Any]:
        """The engine's counters."""
        found: dict[str, Any] = self.get("/stats").json()["engine"]
        return found

    def wait_until_idle(self, seconds: float = 20) -> dict[str, Any]:
        """The counters once nothing runs or waits and every page is free."""
        end = time.monotonic() + seconds
        while True:
            counters = self.engine_statistics()
            is_idle = counters["running"] == counters["waiting"] == 0
            if is_idle and counters["pages_free"] == counters["pages_usable"]:
                return counters
            assert time.monotonic() < end, f"not idle: {counters}"
            time.sleep(0.1)
