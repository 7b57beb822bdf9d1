"""Where fetched and converted models are kept, and how a folder appears there whole or not at all."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def cache_folder() -> Path:
    """`OSTINATO_CACHE`, or `~/.cache/ostinato`."""
    given = os.environ.get("OSTINATO_CACHE")
    return Path(given).expanduser() if given else Path.home() / ".cache" / "ostinato"


@contextmanager
def appearing_whole(target: Path) -> Iterator[Path]:
    """A temporary folder to write to, renamed to `target` at the end and removed on failure.

    Two processes may do the same work at once: the first to finish wins, the other's copy is dropped.
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
