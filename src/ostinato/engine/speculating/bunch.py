"""Several new tokens per request, returned to the host in one line."""

from typing import NamedTuple


class Bunch(NamedTuple):
    """The layout of the line of a step that verified drafts; see `kernels.speculation.acceptance`."""

    num_requests: int
    """R of the graph that wrote it, padding included."""
    query_len: int
    """Tokens of each request."""
