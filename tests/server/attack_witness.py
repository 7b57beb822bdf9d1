"""What a bystander sees of an attacked server: a process of its own, so that the attack costs it nothing.

It asks for `/health` again and again, reads one stream after the other, and does both with a control too: a
process that answers at once and one that sends a byte every 10 ms. It also counts what share of the cores
went to processes that have nothing to do with the test: what the server and its attackers take themselves is
no excuse. It ends when its standard input has and `/health` was asked for three times, and prints what it
saw as JSON.
"""

import contextlib
import http.client
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

PAUSE = 0.05
FEWEST_HEALTH = 3
MOST_WAIT = 20.0
"""Seconds for the last of them."""
TICKS = os.sysconf("SC_CLK_TCK")


def main(port: int, wants_stream: bool) -> None:
    """Watch until told to stop."""
    test = os.getppid()
    answering, ticking = socket.create_server(("127.0.0.1", 0)), socket.create_server(("127.0.0.1", 0))
    for listening, act in ((answering, answer), (ticking, tick)):
        if not os.fork():
            serve(listening, act)
    done = threading.Event()
    names = ("health", "control", "gap", "first", "control_gap", "others")
    seen: dict[str, list[float]] = {name: [] for name in names}
    failures: list[str] = []

    def watch_health() -> None:
        while not done.is_set():
            seen["health"].append(timed(lambda: ask_health(port, failures)))
            seen["control"].append(timed(lambda: ping(answering.getsockname())))
            done.wait(PAUSE)

    def watch_stream() -> None:
        while not done.is_set():
            try:
                for first, gap in stream_gaps(port):
                    seen["first" if first else "gap"].append(gap)
                done.wait(4 * PAUSE)
            except (OSError, http.client.HTTPException, ValueError) as error:
                failures.append(f"stream: {type(error).__name__}: {error}")
                done.wait(PAUSE)

    def watch_control() -> None:
        with socket.create_connection(ticking.getsockname()) as connection:
            last = time.monotonic()
            while not done.is_set() and connection.recv(1):
                now = time.monotonic()
                seen["control_gap"].append(now - last)
                last = now

    def watch_others() -> None:
        busy, ours = busy_seconds(), seconds_of_tree(test)
        began = time.monotonic()
        while not done.wait(1.0):
            now, then = time.monotonic(), began
            new_busy, new_ours, began = busy_seconds(), seconds_of_tree(test), now
            spent = max(0.0, (new_busy - busy) - max(0.0, new_ours - ours))
            seen["others"].append(min(1.0, spent / ((now - then) * (os.cpu_count() or 1))))
            busy, ours = new_busy, new_ours

    watches: list[Callable[[], None]] = [
        watch_health,
        watch_control,
        watch_others,
        *([watch_stream] if wants_stream else []),
    ]
    threads = [threading.Thread(target=watch, daemon=True) for watch in watches]
    for thread in threads:
        thread.start()
    sys.stdin.read()
    end = time.monotonic() + MOST_WAIT
    while len(seen["health"]) < FEWEST_HEALTH and time.monotonic() < end:
        time.sleep(PAUSE)
    done.set()
    for thread in threads:
        thread.join(5)
    worst = {name: max(found, default=0.0) for name, found in seen.items()}
    counts = {f"num_{name}": len(found) for name, found in seen.items()}
    print(
        json.dumps({**worst, **counts, "failures": failures[:5], "num_failures": len(failures)}), flush=True
    )


def timed(act: Callable[[], None]) -> float:
    began = time.monotonic()
    act()
    return time.monotonic() - began


def ask_health(port: int, failures: list[str]) -> None:
    try:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        connection.request("GET", "/health")
        status = connection.getresponse().status
        connection.close()
        if status != 200:
            failures.append(f"health: {status}")
    except (OSError, http.client.HTTPException) as error:
        failures.append(f"health: {type(error).__name__}: {error}")


def stream_gaps(port: int) -> Iterator[tuple[bool, float]]:
    """Times between what comes of one stream; True with the first."""
    body = json.dumps({"prompt": "a", "max_tokens": 200, "temperature": 0, "stream": True})
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    last = time.monotonic()
    connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
    answer = connection.getresponse()
    if answer.status != 200:
        raise ValueError(f"{answer.status} {answer.read()[:200]!r}")
    is_first, has_ended = True, False
    while line := answer.readline():
        if line.startswith(b"data: "):
            now = time.monotonic()
            yield is_first, now - last
            last, is_first = now, False
            if b'"error"' in line:
                raise ValueError(line[:200].decode())
            has_ended = b"[DONE]" in line
    connection.close()
    if not has_ended:
        raise ValueError("a stream ended in the middle")


def ping(address: tuple[str, int]) -> None:
    with socket.create_connection(address) as connection:
        connection.sendall(b"?")
        connection.recv(1)


def serve(listening: socket.socket, act: Callable[[socket.socket], None]) -> None:
    parent = os.getppid()
    listening.settimeout(1)
    while os.getppid() == parent:
        with contextlib.suppress(OSError):
            connection, _ = listening.accept()
            with connection:
                act(connection)
    os._exit(0)


def busy_seconds() -> float:
    """Of all cores, since the machine began; what a hypervisor gave to others included."""
    user, nice, system, _, _, *interrupts = map(
        int, Path("/proc/stat").read_text().split("\n")[0].split()[1:9]
    )
    return (user + nice + system + sum(interrupts)) / TICKS


def seconds_of_tree(root: int) -> float:
    """Of a process and all below it, those that have ended included."""
    parents, seconds = {}, {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            parents[int(folder.name)] = int(fields[1])
            seconds[int(folder.name)] = sum(map(int, fields[11:15])) / TICKS

    def is_below(process: int) -> bool:
        while process not in (root, 0) and process in parents:
            process = parents[process]
        return process == root

    return sum(taken for process, taken in seconds.items() if is_below(process))


def answer(connection: socket.socket) -> None:
    connection.settimeout(5)
    connection.recv(1)
    connection.sendall(b"!")


def tick(connection: socket.socket) -> None:
    while True:
        connection.sendall(b".")
        time.sleep(0.01)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2] == "stream")
