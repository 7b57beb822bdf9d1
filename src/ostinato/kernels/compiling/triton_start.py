"""What Triton does once in a process, done beside something else.

Its first launch hashes Triton's own files, for the keys of its cache (0.4 s), and opens the driver, through a
C module that is built where it is not on disk (0.6 s). Neither holds Python's lock for long.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from typing import Any


def begin() -> None:
    """Start in threads; whoever does must come to `finish`. For a process that has a GPU."""
    _begun()


def finish() -> None:
    """Wait until it is done and no thread of it is left: before the first launch, and before a fork.

    Raises what went wrong, which the first launch would have met as well.
    """
    threads, parts = _begun()
    _begun.cache_clear()  # nothing is lost: Triton remembers what it did, and may try again what failed
    threads.shutdown()
    for part in parts:
        part.result()


@cache
def _begun() -> tuple[ThreadPoolExecutor, list[Future[Any]]]:
    threads = ThreadPoolExecutor(2)
    return threads, [threads.submit(_hash_files), threads.submit(_open_driver)]


def _hash_files() -> None:
    from triton.runtime import cache as kernels_on_disk

    # Where it is called something else, the first launch does it.
    getattr(kernels_on_disk, "triton_key", int)()


def _open_driver() -> Any:
    import triton

    return triton.runtime.driver.active.utils
