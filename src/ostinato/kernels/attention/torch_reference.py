"""Paged attention in plain torch: what the CPU runs, and what every kernel is tested against.

Two ways to the same result. `attend_captured` has static shapes and reads nothing back, so it can be part of
any graph; it gathers up to `max_context` positions whatever the real lengths are. `attend_eager` runs between
captured segments, knows the real lengths and does no more work than they ask for. Scores and sums are kept
in float32 (float64 for float64 inputs) whatever the cache holds.

Outputs of padded tokens are finite. Reads of a real token stay inside its own context: positions it may not
see are replaced by its own, then masked, so nothing a padded row leaves on page 0 can reach it.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from .batch import PAGE_SIZE, AttentionBatch, HeadPreparation, HostLengths

# Elements of gathered K, or of scores, in one piece of work: 16 MB in float32, to stay near the caches.
_PIECE_ELEMENTS = 1 << 22

# How many query heads of padded queries cost as much as one token's gather of its own context (measured on a
# CPU: 4 to 27 over the head counts of small models, mostly near 10).
_GATHER_COST = 10


def write_kv(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, batch: AttentionBatch) -> None:
    """Store the step's k and v [T, Hkv, D] at the tokens' slots; padded tokens write to page 0."""
    slots = batch.slots()
    for new, cache in ((k, k_cache), (v, v_cache)):
        cache.view(-1, *cache.shape[2:]).index_copy_(0, slots, new.to(cache.dtype))


def prepare_heads(
    qkv: Tensor, heads: HeadPreparation, num_heads: int, num_kv_heads: int, positions: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v from qkv [T, (Hq + 2 Hkv) * D]; q and k normalised and turned by their positions."""
    head_dim = heads.rotary.size(1)
    sizes = [num_heads * head_dim, num_kv_heads * head_dim, num_kv_heads * head_dim]
    q, k, v = (part.unflatten(1, (-1, head_dim)) for part in qkv.split(sizes, dim=1))
    if heads.q_norm is not None:
        q = F.rms_norm(q, heads.q_norm.shape, heads.q_norm, heads.eps)
        k = F.rms_norm(k, heads.q_norm.shape, heads.k_norm, heads.eps)
    cos, sin = heads.rotary.index_select(0, positions).unsqueeze(1).chunk(2, dim=-1)

    def turned(x: Tensor) -> Tensor:
        a, b = x.float().chunk(2, dim=-1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1).to(x.dtype)

    return turned(q), turned(k), v


def attend_captured(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    batch: AttentionBatch,
    *,
    scale: float,
    sliding_window: int | None = None,
) -> Tensor:
    """Causal attention of q [T, Hq, D] over the cache; legal in a captured graph for any batch.

    Made for decode. For longer queries the host values of the batch choose between one gather per token and
    one per request with padded queries.
    """
    num_tokens, num_heads, _ = q.shape
    group = num_heads // k_cache.size(2)
    prefix_lens = batch.prefix_lens_for(sliding_window)
    if prefix_lens is not None:
        return _attend_cascade(q, k_cache, v_cache, batch, prefix_lens, scale)
    padded_queries = batch.req_rows.size(0) * batch.max_query_len
    if batch.max_query_len > 1 and padded_queries * group <= _GATHER_COST * num_tokens:
        return _attend_padded_queries(q, k_cache, v_cache, batch, scale, sliding_window)
    rows, positions, width = batch.token_rows, batch.positions, batch.max_context
    return _attend_tokens(q, k_cache, v_cache, batch, rows, positions, width, scale, sliding_window)


def attend_eager(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    batch: AttentionBatch,
    *,
    scale: float,
    sliding_window: int | None = None,
    lengths: HostLengths | None = None,
) -> Tensor:
    """The same function outside a graph: prompts one by one, single tokens together, at their real lengths.

    Without `lengths` they are read back from the device.
    """
    lengths = lengths or HostLengths.read(batch)
    out = torch.zeros_like(q, memory_format=torch.contiguous_format)
    single_tokens: list[int] = []
    longest_single = 0
    for request, query_len in enumerate(lengths.query_lens):
        start, seq_len = lengths.query_starts[request], lengths.seq_lens[request]
        if query_len == 1:
            single_tokens.append(start)
            longest_single = max(longest_single, seq_len)
        elif query_len > 1:
            queries = slice(start, start + query_len)
            pages = batch.page_table.index_select(0, batch.req_rows[request : request + 1])[0]
            out[queries] = _attend_request(
                q[queries], k_cache, v_cache, pages, seq_len, scale, sliding_window
            )
    if single_tokens:
        chosen = torch.tensor(single_tokens, device=q.device)
        rows, positions = batch.token_rows[chosen], batch.positions[chosen]
        out[chosen] = _attend_tokens(
            q[chosen], k_cache, v_cache, batch, rows, positions, longest_single, scale, sliding_window
        )
    return out


def _attend_tokens(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    batch: AttentionBatch,
    rows: Tensor,
    positions: Tensor,
    max_context: int,
    scale: float,
    window: int | None,
) -> Tensor:
    """Each token gathers the context it sees; a few tokens at a time."""
    num_tokens, num_heads, head_dim = q.shape
    num_kv_heads = k_cache.size(2)
    width = max_context if window is None else min(max_context, window)
    piece = max(1, _PIECE_ELEMENTS // (width * num_kv_heads * head_dim))
    all_slots, all_visible = batch.contexts(rows, positions, width)
    outputs = []
    for begin in range(0, num_tokens, piece):
        here = slice(begin, begin + piece)
        slots, visible = all_slots[here], all_visible[here][:, None, None, :]
        queries = q[here].reshape(-1, num_kv_heads, num_heads // num_kv_heads, head_dim)
        outputs.append(_attend_gathered(queries, k_cache, v_cache, slots, visible, scale).reshape_as(q[here]))
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


def _attend_cascade(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, batch: AttentionBatch, prefix_lens: Tensor, scale: float
) -> Tensor:
    """Single tokens over the prefix that their requests share, then over what each has behind it.

    Both parts have room for the longest context: here this shows that the parts are joined rightly and saves
    nothing, on a GPU a kernel does no more than the lengths ask for.
    """
    num_tokens, num_heads, head_dim = q.shape
    num_kv_heads, width = k_cache.size(2), batch.max_context
    precise = torch.promote_types(q.dtype, torch.float32)
    queries = q.to(precise).reshape(num_tokens, num_kv_heads, num_heads // num_kv_heads, head_dim)
    prefix_len = prefix_lens.index_select(0, batch.token_rows).long().unsqueeze(1)
    seen = torch.arange(width, device=q.device)

    slots = batch.slots_at(batch.token_rows[:1], seen)
    k, v = (cache.flatten(0, 1).index_select(0, slots).to(precise) for cache in (k_cache, v_cache))
    in_prefix = seen < prefix_len
    scores = torch.einsum("thgd,chd->thgc", queries, k) * scale
    # What nobody sees may be anything, and zero times that is not always zero.
    v = v.masked_fill(~in_prefix.any(0)[:, None, None], 0)
    prefix = _part(scores, in_prefix, lambda weights: torch.einsum("thgc,chd->thgd", weights, v))

    last = batch.positions.unsqueeze(1)
    own = prefix_len + seen
    slots = batch.slots_at(batch.token_rows.unsqueeze(1), torch.minimum(own, last))
    k, v = (cache.flatten(0, 1)[slots].to(precise) for cache in (k_cache, v_cache))
    scores = torch.einsum("thgd,tchd->thgc", queries, k) * scale
    suffix = _part(scores, own <= last, lambda weights: torch.einsum("thgc,tchd->thgd", weights, v))

    best = torch.maximum(prefix[0], suffix[0])
    of_prefix, of_suffix = torch.exp(prefix[0] - best), torch.exp(suffix[0] - best)
    total = prefix[1] * of_prefix + suffix[1] * of_suffix
    mixed = prefix[2] * of_prefix + suffix[2] * of_suffix
    return (mixed / total).reshape_as(q).to(q.dtype)


def _part(scores: Tensor, visible: Tensor, mix: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """A part of a softmax over scores [T, Hkv, G, C] where `visible` [T, C]: best, sum of weights, mix."""
    scores = scores.masked_fill(~visible[:, None, None, :], float("-inf"))
    # Finite where nothing is visible: -inf minus -inf would be NaN.
    best = scores.amax(-1, keepdim=True).clamp(min=torch.finfo(scores.dtype).min / 2)
    weights = torch.exp(scores - best)
    return best, weights.sum(-1, keepdim=True), mix(weights)


def _attend_padded_queries(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, batch: AttentionBatch, scale: float, window: int | None
) -> Tensor:
    """Each request gathers its context once, for all its queries padded to `max_query_len`."""
    num_tokens, num_heads, head_dim = q.shape
    num_kv_heads = k_cache.size(2)
    group = num_heads // num_kv_heads
    num_requests, num_queries = batch.req_rows.size(0), batch.max_query_len
    # One row more than there are tokens: padded queries read any token and write to that row.
    out = q.new_zeros(num_tokens + 1, num_heads, head_dim)
    query_ids = torch.arange(num_queries, device=q.device)
    seen = torch.arange(batch.max_context, device=q.device)
    per_position = max(num_queries * num_heads, num_kv_heads * head_dim)
    piece = max(1, _PIECE_ELEMENTS // (batch.max_context * per_position))
    for begin in range(0, num_requests, piece):
        here = slice(begin, begin + piece)
        query_lens = batch.query_lens[here].long().unsqueeze(1)
        seq_lens = batch.seq_lens[here].long().unsqueeze(1)
        real = query_ids < query_lens
        tokens = torch.where(real, batch.query_starts[here].unsqueeze(1) + query_ids, num_tokens)
        positions = (seq_lens - query_lens + query_ids).clamp(min=0).minimum(seq_lens - 1)
        visible = seen <= positions.unsqueeze(2)
        places = seen.minimum(seq_lens - 1)
        if window is not None:
            visible = visible & (seen > positions.unsqueeze(2) - window)
            # Pages before all windows may be gone.
            places = places.maximum((seq_lens - query_lens - window + 1).clamp(max=seq_lens - 1))
        slots = batch.slots_at(batch.req_rows[here].unsqueeze(1), places)
        queries = q.index_select(0, tokens.clamp(max=num_tokens - 1).view(-1))
        queries = queries.view(-1, num_queries, num_kv_heads, group, head_dim).permute(0, 2, 3, 1, 4)
        result = _attend_gathered(
            queries.reshape(-1, num_kv_heads, group * num_queries, head_dim),
            k_cache,
            v_cache,
            slots,
            visible.repeat(1, group, 1).unsqueeze(1),
            scale,
        )
        result = result.view(-1, num_kv_heads, group, num_queries, head_dim).permute(0, 3, 1, 2, 4)
        out.index_copy_(0, tokens.view(-1), result.reshape(-1, num_heads, head_dim))
    return out[:num_tokens]


def _attend_gathered(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor, visible: Tensor, scale: float
) -> Tensor:
    """q [n, Hkv, M, D] over the positions at slots [n, C], where `visible` [n, 1, 1 or M, C]."""
    num_kv_heads = k_cache.size(2)
    precise = torch.promote_types(q.dtype, torch.float32)
    # Gathering head by head gives [n, Hkv, C, D] at once: the products need no further copy.
    heads = torch.arange(num_kv_heads, device=q.device).unsqueeze(1)
    places = slots.unsqueeze(1) * num_kv_heads + heads
    k, v = (F.embedding(places, cache.view(-1, cache.size(3))).to(precise) for cache in (k_cache, v_cache))
    return F.scaled_dot_product_attention(q.to(precise), k, v, attn_mask=visible, scale=scale).to(q.dtype)


def _attend_request(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    pages: Tensor,
    seq_len: int,
    scale: float,
    window: int | None,
) -> Tensor:
    """One request's queries q [L, Hq, D] over its context of `seq_len` positions."""
    query_len = q.size(0)
    first_query = seq_len - query_len
    first_seen = 0 if window is None else max(0, first_query - window + 1)
    first_page = first_seen // PAGE_SIZE
    pages = pages[first_page : -(-seq_len // PAGE_SIZE)]
    begin, end = first_seen - first_page * PAGE_SIZE, seq_len - first_page * PAGE_SIZE
    k, v = (
        cache.index_select(0, pages).flatten(0, 1)[begin:end].to(q.dtype).transpose(0, 1).unsqueeze(0)
        for cache in (k_cache, v_cache)
    )
    queries = q.transpose(0, 1).unsqueeze(0)
    if query_len == seq_len and (window is None or window >= seq_len):
        mixed = F.scaled_dot_product_attention(queries, k, v, is_causal=True, scale=scale, enable_gqa=True)
    else:
        query_positions = torch.arange(first_query, seq_len, device=q.device).unsqueeze(1)
        seen = torch.arange(first_seen, seq_len, device=q.device)
        visible = seen <= query_positions
        if window is not None:
            visible &= seen > query_positions - window
        mixed = F.scaled_dot_product_attention(queries, k, v, attn_mask=visible, scale=scale, enable_gqa=True)
    return mixed[0].transpose(0, 1)
