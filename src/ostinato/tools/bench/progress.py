"""Reports on standard error what is being measured, because some of it takes minutes on a small machine."""

import sys


def tell(text: str) -> None:
    """Print one line."""
    print(f"ostinato bench: {text}", file=sys.stderr, flush=True)
