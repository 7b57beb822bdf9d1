"""When attention reads a prefix shared by all requests of a decode batch once, instead of once per request.

Note [What a cascade saves and costs]
R requests that share P tokens read R * P tokens' keys and values in every layer; a cascade reads P, which
saves (R - 1) * P tokens. In every layer it costs two more kernels, one over the prefix and one that merges
its results with those of the requests, and a Triton kernel instead of CUDA C++ for what follows the prefix:
estimated at 10 microseconds a layer. In that time an H200 reads 45 MB from memory. But a prefix of a few
thousand tokens, which all requests read at about the same time, comes from L2 for all but one of them, so the
estimate is 60 MB. Qwen3-0.6B and Llama-3.1-8B have 4 kB per token in a layer: a cascade is chosen from 16,384
saved tokens on, which is 2,341 shared by 8 requests, or 529 by 32.
"""

LEAST_REQUESTS = 4
"""Smaller batches never run as a cascade, so nothing is captured for them: their prefix would have to be many
thousand tokens long, and at most one half to two thirds of attention's reading can be saved."""

LEAST_SAVED_BYTES = 64 << 20
"""Of keys and values in one layer."""


def pays(num_requests: int, shared_tokens: int, bytes_per_token: int) -> bool:
    """Whether so many requests should read so many shared tokens once; `bytes_per_token`: in one layer."""
    saved = (num_requests - 1) * shared_tokens * bytes_per_token
    return num_requests >= LEAST_REQUESTS and saved >= LEAST_SAVED_BYTES
