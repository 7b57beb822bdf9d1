"""Random paged batches, and attention over them written the slow and obvious way in float64."""

from dataclasses import dataclass

import torch
from torch import Tensor

from ostinato.kernels.attention import PAGE_SIZE, AttentionBatch, HostLengths


@dataclass(frozen=True)
class Case:
    """One step: its batch, a cache with this step's k and v not yet written, and the inputs of attention."""

    batch: AttentionBatch
    q: Tensor
    k: Tensor
    v: Tensor
    k_cache: Tensor
    v_cache: Tensor
    lengths: HostLengths
    scale: float

    @property
    def num_real_tokens(self) -> int:
        return sum(self.lengths.query_lens)


def make_case(
    requests: list[tuple[int, int]],
    *,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    head_dim: int = 16,
    padded_tokens: int = 0,
    padded_requests: int = 0,
    slack_context: int = 0,
    max_query_len: int | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    seed: int = 0,
    poison: float | None = None,
    shared_pages: int | None = None,
) -> Case:
    """`requests`: (context, query) lengths of each; queries are its last tokens. `poison` fills page 0.

    With `shared_pages` all requests begin with so many pages of the first, and the batch says so.
    """
    generator = torch.Generator().manual_seed(seed)
    context = max([seq_len for seq_len, _ in requests] + [1]) + slack_context
    pages_each = -(-context // PAGE_SIZE)
    rows = torch.randperm(len(requests) + 3, generator=generator)[: len(requests)] + 1
    max_rows = len(requests) + 4
    num_pages = sum(-(-seq_len // PAGE_SIZE) for seq_len, _ in requests) + 4
    order = torch.randperm(num_pages - 1, generator=generator) + 1
    page_table = torch.zeros(max_rows, pages_each, dtype=torch.int32)
    taken = 0
    token_rows, positions, starts = [], [], []
    for (seq_len, query_len), row in zip(requests, rows.tolist(), strict=True):
        needed = -(-seq_len // PAGE_SIZE)
        page_table[row, :needed] = order[taken : taken + needed].int()
        taken += needed
        starts.append(len(positions))
        token_rows += [row] * query_len
        positions += range(seq_len - query_len, seq_len)
    num_tokens = len(positions) + padded_tokens
    prefix_lens = None
    if shared_pages is not None:
        assert all(seq_len > shared_pages * PAGE_SIZE for seq_len, _ in requests)
        page_table[rows, :shared_pages] = page_table[rows[:1], :shared_pages]
        prefix_lens = torch.full((max_rows,), 1 << 20, dtype=torch.int32)
        prefix_lens[rows], prefix_lens[0] = shared_pages * PAGE_SIZE, 0

    on_device = torch.Generator(device).manual_seed(seed)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=on_device, device=device).to(dtype)

    k_cache = random(num_pages, PAGE_SIZE, num_kv_heads, head_dim)
    v_cache = random(num_pages, PAGE_SIZE, num_kv_heads, head_dim)
    if poison is not None:
        k_cache[0], v_cache[0] = poison, poison
    seq_lens = [seq_len for seq_len, _ in requests]
    query_lens = [query_len for _, query_len in requests]

    def ints(values: list[int], padding: int, amount: int, kind: torch.dtype = torch.int32) -> Tensor:
        return torch.tensor(values + [padding] * amount, dtype=kind).to(device)

    batch = AttentionBatch(
        page_table=page_table.to(device),
        token_rows=ints(token_rows, 0, padded_tokens),
        positions=ints(positions, 0, padded_tokens, torch.int64),
        req_rows=ints(rows.tolist(), 0, padded_requests),
        seq_lens=ints(seq_lens, 1, padded_requests),
        query_starts=ints(starts, 0, padded_requests),
        query_lens=ints(query_lens, 0, padded_requests),
        max_query_len=max_query_len or max([*query_lens, 1]),
        max_context=context,
        prefix_lens=None if prefix_lens is None else prefix_lens.to(device),
    )
    return Case(
        batch=batch,
        q=random(num_tokens, num_heads, head_dim),
        k=random(num_tokens, num_kv_heads, head_dim),
        v=random(num_tokens, num_kv_heads, head_dim),
        k_cache=k_cache,
        v_cache=v_cache,
        lengths=HostLengths(starts, query_lens, seq_lens),
        scale=head_dim**-0.5,
    )


def written_caches(case: Case) -> tuple[Tensor, Tensor]:
    """The caches after the step's k and v, written token by token."""
    k_cache, v_cache = case.k_cache.clone(), case.v_cache.clone()
    rows, positions, page_table = (
        tensor.tolist() for tensor in (case.batch.token_rows, case.batch.positions, case.batch.page_table)
    )
    for token in range(case.num_real_tokens):
        row, position = rows[token], positions[token]
        page = page_table[row][position // PAGE_SIZE]
        k_cache[page, position % PAGE_SIZE] = case.k[token]
        v_cache[page, position % PAGE_SIZE] = case.v[token]
    return k_cache, v_cache


def dense_attention(case: Case, window: int | None = None) -> Tensor:
    """The real tokens' attention in float64, request by request over contiguous, repeated KV."""
    k_cache, v_cache = written_caches(case)
    group = case.q.size(1) // k_cache.size(2)
    outputs = []
    for request, (start, query_len, seq_len) in enumerate(
        zip(case.lengths.query_starts, case.lengths.query_lens, case.lengths.seq_lens, strict=True)
    ):
        pages = case.batch.page_table[case.batch.req_rows[request]].long()
        k, v = (
            cache[pages].flatten(0, 1)[:seq_len].double().repeat_interleave(group, dim=1)
            for cache in (k_cache, v_cache)
        )
        q = case.q[start : start + query_len].double()
        scores = torch.einsum("qhd,khd->hqk", q, k) * case.scale
        distance = (torch.arange(seq_len - query_len, seq_len)[:, None] - torch.arange(seq_len)[None, :]).to(
            q.device
        )
        hidden = (distance < 0) | (distance >= (window or seq_len + 1))
        scores = scores.masked_fill(hidden, float("-inf"))
        outputs.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1), v))
    return torch.cat(outputs)
