"""Where downloaded and converted models are kept, and how a folder appears there whole or not at all.

Note [One at a time]
The process that makes a folder holds a lock on a file of its name in `locks`, which the system releases when
the process ends, however it ends. So two first starts do the work once, and an unfinished folder whose lock
is free was left by a killed process.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from .errors import ModelError


def cache_folder() -> Path:
    """`OSTINATO_CACHE`, or `~/.cache/ostinato`."""
    given = os.environ.get("OSTINATO_CACHE")
    return Path(given).expanduser() if given else Path.home() / ".cache" / "ostinato"


def kept_whole(target: Path, make: Callable[[Path], object], damage: Callable[[Path], str | None]) -> Path:
    """A folder in the cache, made by `make` if it does not exist, and made again if it is damaged.

    `damage` says what is wrong with it, or None. Raises ModelError if it cannot be written.
    """
    _remove_leftovers(target.parent)
    if target.is_dir() and damage(target) is None:
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _lock_of(target):
            if os.path.lexists(target):
                problem = damage(target) if target.is_dir() else "it is not a folder"
                if problem is None:  # another process has made it meanwhile
                    return target
                print(f"ostinato: {target} is being rebuilt: {problem}", file=sys.stderr, flush=True)
                _remove(target)
            with appearing_whole(target) as scratch:
                make(scratch)
    except OSError as error:
        raise ModelError(_cannot_write(target, error)) from error
    return target


def check_room(folder: Path, needed: int) -> None:
    """Raises OSError if there is no room for this many bytes."""
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise OSError(errno.ENOSPC, f"{needed:,} bytes are needed, but {free:,} bytes are free")


@contextmanager
def appearing_whole(target: Path) -> Iterator[Path]:
    """A temporary folder to write to, renamed to `target` at the end and removed on failure.

    Two processes may do the same work at once: the first to finish wins, the other's copy is deleted.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        yield scratch
        scratch.chmod(0o755)
        try:
            scratch.rename(target)
        except OSError:
            if not target.is_dir():
                raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


@contextmanager
def _lock_of(target: Path, *, wait: bool = True) -> Iterator[bool]:
    """Take the lock of a folder; yields whether it is certain that no other process is making the folder. See
    Note [One at a time]."""
    try:
        locks = cache_folder() / "locks"
        locks.mkdir(parents=True, exist_ok=True)
        lock = os.open(locks / f"{target.parent.name}-{target.name}", os.O_RDWR | os.O_CREAT, 0o644)
    except OSError:
        yield False
        return
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except OSError:  # another process has it, or the file system has no locks
            yield False
        else:
            yield True
    finally:
        os.close(lock)


def _remove_leftovers(folder: Path) -> None:
    """Remove what killed processes left."""
    for leftover in folder.glob(".*-????????") if folder.is_dir() else ():
        target = folder / leftover.name[1:].rpartition("-")[0]
        with _lock_of(target, wait=False) as is_left:
            if is_left:
                shutil.rmtree(leftover, ignore_errors=True)


def _remove(target: Path) -> None:
    """Remove a folder in one step, so that it is never half there."""
    if target.is_dir() and not target.is_symlink():
        away = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
        target.rename(away)
        shutil.rmtree(away, ignore_errors=True)
    else:
        target.unlink()


def _cannot_write(target: Path, error: OSError) -> str:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        said = "" if error.strerror == os.strerror(error.errno) else f": {error.strerror}"
        return f"no space left for {target}{said}; free space, or set OSTINATO_CACHE to another folder"
    return f"{target} cannot be written: {error.strerror or error}; set OSTINATO_CACHE to a writable folder"
