"""Tells on standard error what is being measured: some of it takes minutes on a small machine."""

import sys


def tell(text: str) -> None:
    """One line."""
    print(f"ostinato bench: {text}", file=sys.stderr, flush=True)
