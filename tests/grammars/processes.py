"""Which processes there are for grammars, as an operator would find them."""

import contextlib
import os
from pathlib import Path


def children(pid: int) -> list[int]:
    """Processes that any thread of this one has started and that are not dead."""
    found = []
    for task in Path(f"/proc/{pid}/task").glob("*"):
        with contextlib.suppress(OSError):
            found += [int(child) for child in (task / "children").read_text().split()]
    return [child for child in found if is_alive(child)]


def is_alive(pid: int) -> bool:
    """Neither gone nor a zombie."""
    return _state(pid) not in ("", "Z")


def is_busy(pid: int) -> bool:
    """Whether it uses the processor, or would if it got one."""
    return _state(pid) == "R"


def _state(pid: int) -> str:
    """One letter, or none if there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def nurseries(engine: int | None = None) -> list[int]:
    """Processes that fork those of grammars, of an engine in this process or in another."""
    found = []
    for child in children(engine or os.getpid()):
        with contextlib.suppress(OSError):
            if b"ostinato.grammars.nursery" in Path(f"/proc/{child}/cmdline").read_bytes():
                found.append(child)
    return found


def grammar_processes(engine: int | None = None) -> list[int]:
    """One for each grammar."""
    return [child for nursery in nurseries(engine) for child in children(nursery)]


def resident_bytes(pid: int) -> int:
    """Memory of a process."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
