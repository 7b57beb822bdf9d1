"""Several new tokens of each request, on their way to the host in one line."""

from typing import NamedTuple


class Bunch(NamedTuple):
    """How the line of a step that has verified drafts is laid out; see `kernels.speculation.acceptance`."""

    num_requests: int
    """R of the graph that wrote it, padding included."""
    query_len: int
    """Tokens of each."""
