"""Every fused op in bf16 against float64 on the same inputs: no worse than 1.5 times what plain torch does.

"Plain torch" is the sequence of bf16 operations that transformers runs. Only public functions are called, so
whichever kernel is chosen for a shape is the one that is judged.
"""

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from kernels.paged_cases import Case, make_case
from ostinato.kernels.attention import PAGE_SIZE, HeadPreparation, get_backend
from ostinato.kernels.linear import few_tokens, products
from ostinato.kernels.linear.weight import Weight
from ostinato.kernels.norms import rows

RATIO = 1.5
"""Our error over that of plain torch, at most."""

TOKENS = (1, 2, 3, 5, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 100, 127, 128, 129, 200, 255, 256)
EPS = 1e-5


def assert_accurate(ours: Tensor, theirs: Tensor, exact: Tensor, about: object) -> None:
    """Errors relative to each row's norm: their root mean square, and the worst row's."""
    assert ours.shape == exact.shape
    assert ours.isfinite().all(), about
    errors = []
    for found in (ours, theirs):
        difference = (found.double() - exact).flatten(1).norm(dim=1)
        errors.append(difference / exact.flatten(1).norm(dim=1).clamp(min=1e-30))
    for name, size in (
        ("root mean square", [e.square().mean().sqrt().item() for e in errors]),
        ("worst row", [e.max().item() for e in errors]),
    ):
        # A result that plain torch gets exactly must be exact to float32 at least.
        assert size[0] <= RATIO * size[1] + 1e-7, f"{about}: {name}: ours {size[0]:.2e}, torch {size[1]:.2e}"


class Inputs:
    """Random bf16 tensors on the device, each call another."""

    def __init__(self, device: torch.device, seed: int) -> None:
        self._generator = torch.Generator(device).manual_seed(seed)
        self._device = device

    def __call__(self, *shape: int, spread: float = 1.0, around: float = 0.0) -> Tensor:
        values = torch.randn(*shape, generator=self._generator, device=self._device)
        return (values * spread + around).bfloat16()


def norm(x: Tensor, weight: Tensor, eps: float = EPS) -> Tensor:
    """As transformers writes it: float32 inside, rounded before the weight; exact in float64."""
    wide = x if x.dtype == torch.float64 else x.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return weight * wide.to(x.dtype)


def gate(x: Tensor) -> Tensor:
    """silu of the first half times the second half."""
    first, second = x.chunk(2, dim=-1)
    return functional.silu(first) * second


def projected(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    norm_weight: Tensor | None,
    gated: bool,
    residual: Tensor | None,
) -> Tensor:
    """`few_tokens.project` step by step, in the precision of x."""
    y = x if norm_weight is None else norm(x, norm_weight)
    y = functional.linear(y, weight, bias)
    y = gate(y) if gated else y
    return y if residual is None else residual + y


def doubled(*tensors: Tensor | None) -> list[Tensor | None]:
    return [None if tensor is None else tensor.double() for tensor in tensors]


# -- linear layers ---------------------------------------------------------------------------------

# (out, in) of qkv, o, gate and up (one half), down.
MODELS = {
    "qwen3-0.6b": ((4096, 1024), (1024, 2048), (3072, 1024), (1024, 3072)),
    "llama-3.2-1b": ((3072, 2048), (2048, 2048), (8192, 2048), (2048, 8192)),
    "llama-3.1-8b": ((6144, 4096), (4096, 4096), (14336, 4096), (4096, 14336)),
    "qwen2.5-0.5b": ((1152, 896), (896, 896), (4864, 896), (896, 4864)),
    "smollm2-135m": ((960, 576), (576, 576), (1536, 576), (576, 1536)),
    "odd": ((49, 200), (77, 1001), (131, 1336), (250, 5003)),
}


@pytest.mark.parametrize("num_tokens", TOKENS)
@pytest.mark.parametrize("model", MODELS)
def test_linear_layers_with_their_neighbours(device, model, num_tokens):
    random = Inputs(device, num_tokens)
    qkv, o, inner, down = MODELS[model]
    cases = (
        ("qkv", qkv, {"norm": True, "bias": model.startswith("qwen2")}),
        ("o", o, {"residual": True}),
        ("gate, up", inner, {"norm": True, "gated": True}),
        ("down", down, {"residual": True}),
    )
    for name, (out_features, in_features), asked in cases:
        gated = asked.get("gated", False)
        x = random(num_tokens, in_features)
        weight = random(out_features * (2 if gated else 1), in_features, spread=in_features**-0.5)
        bias = random(weight.size(0)) if asked.get("bias") else None
        norm_weight = random(in_features, spread=0.3, around=1.0) if asked.get("norm") else None
        residual = random(num_tokens, out_features) if asked.get("residual") else None
        about = (model, name, num_tokens)

        ours = few_tokens.project(
            x, Weight(weight), bias, norm_weight=norm_weight, eps=EPS, gated=gated, residual=residual
        )
        theirs = projected(x, weight, bias, norm_weight, gated, residual)
        wide = doubled(x, weight, bias, norm_weight)
        exact = projected(*wide, gated, *doubled(residual))
        assert ours.dtype == torch.bfloat16
        assert_accurate(ours, theirs, exact, about)

        product = products.gated_linear if gated else products.linear
        theirs = projected(x, weight, bias, None, gated, None)
        exact = projected(*wide[:3], None, gated, None)
        assert_accurate(product(x, Weight(weight), bias), theirs, exact, (*about, "alone"))


@pytest.mark.parametrize("num_tokens", TOKENS)
@pytest.mark.parametrize("size", [(151_936, 1024), (128_256, 2048), (49_152, 576), (1009, 200)], ids=str)
def test_logits(device, size, num_tokens):
    random = Inputs(device, num_tokens)
    x, weight = random(num_tokens, size[1]), random(*size, spread=size[1] ** -0.5)
    exact, theirs = x.double() @ weight.double().t(), functional.linear(x, weight)
    ours = products.float_linear(x, Weight(weight))
    assert ours.dtype == torch.float32
    assert_accurate(ours, theirs, exact, (size, num_tokens))
    into = torch.full_like(ours, float("nan"))
    assert products.float_linear(x, Weight(weight), into) is into
    assert torch.equal(into, ours)


# -- rows ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_tokens", TOKENS)
@pytest.mark.parametrize("width", [64, 100, 576, 1024, 4096, 5120])
def test_rows(device, num_tokens, width):
    random = Inputs(device, num_tokens + width)
    x, residual, weight = random(num_tokens, width), random(num_tokens, width), random(width, around=1.0)
    about = (num_tokens, width)
    wide, wide_weight = x.double(), weight.double()
    assert_accurate(rows.rms_norm(x, weight, EPS), norm(x, weight), norm(wide, wide_weight), about)
    normed, total = rows.add_rms_norm(x, residual.clone(), weight, EPS)
    assert torch.equal(total, x + residual)
    exact = norm(wide + residual.double(), wide_weight)
    assert_accurate(normed, norm(x + residual, weight), exact, (*about, "after adding"))
    both = torch.cat([x, residual], dim=1)
    assert_accurate(rows.silu_mul(both.clone()), gate(both), gate(both.double()), (*about, "gate"))


# -- attention -------------------------------------------------------------------------------------

CONTEXTS = (1, 15, 16, 17, 255, 257, 1000, 4097, 32_768)
# (query heads, KV heads, head size): every group size and head size that the families have.
HEADS = (
    (12, 12, 64),
    (32, 32, 96),
    (16, 8, 128),
    (9, 3, 64),
    (32, 8, 64),
    (32, 8, 80),
    (40, 8, 128),
    (12, 2, 128),
    (14, 2, 64),
    (64, 8, 128),
    (16, 8, 256),
    (32, 2, 128),
    (16, 1, 256),
)
EVERY_BATCH = ((16, 8, 128), (32, 8, 64), (14, 2, 64))
"""Heads that are tried at all numbers of tokens; the others at a few."""
FEW_BATCHES = (1, 3, 8, 17, 33)


def contexts_of(num_tokens: int) -> list[int]:
    """All of CONTEXTS in turn, as long as that fits; many tokens have short contexts, and one that is not."""
    if num_tokens == 1:
        return [1000]
    longest = 32_768 if num_tokens <= 9 else 4097 if num_tokens <= 33 else 1000
    allowed = [context for context in CONTEXTS if context <= longest]
    return [allowed[-1 - index % len(allowed)] for index in range(num_tokens)]


def preparation(random: Inputs, device: torch.device, head_dim: int, normed: bool) -> HeadPreparation:
    """Rotation by the angles of a base of 10,000, with or without norms of heads."""
    frequency = 10_000 ** (-torch.arange(0, head_dim, 2, device=device, dtype=torch.float64) / head_dim)
    angles = torch.arange(32_800, device=device, dtype=torch.float64).unsqueeze(1) * frequency
    table = torch.cat([angles.cos(), angles.sin()], dim=1).float()
    if not normed:
        return HeadPreparation(table)
    # Sharp scores: a nearly flat softmax would not notice a wrong position.
    q_norm, k_norm = random(head_dim, spread=0.2, around=3.0), random(head_dim, spread=0.2, around=1.0)
    return HeadPreparation(table, q_norm, k_norm, EPS)


def heads_of(
    projected: Tensor, heads: HeadPreparation, shape: tuple[int, int, int], positions: Tensor
) -> list[Tensor]:
    """q, k, v as transformers makes them, cos and sin in the precision of the rows."""
    num_heads, num_kv_heads, head_dim = shape
    sizes = [num_heads * head_dim, num_kv_heads * head_dim, num_kv_heads * head_dim]
    q, k, v = (part.unflatten(1, (-1, head_dim)) for part in projected.split(sizes, dim=1))
    if heads.q_norm is not None and heads.k_norm is not None:
        q, k = norm(q, heads.q_norm.to(q.dtype)), norm(k, heads.k_norm.to(k.dtype))
    cos, sin = heads.rotary[positions].to(q.dtype).unsqueeze(1).chunk(2, dim=-1)
    cos, sin = torch.cat([cos, cos], -1), torch.cat([sin, sin], -1)

    def turned(x: Tensor) -> Tensor:
        first, second = x.chunk(2, dim=-1)
        return x * cos + torch.cat([-second, first], -1) * sin

    return [turned(q), turned(k), v]


def attention(case: Case, q: Tensor, k: Tensor, v: Tensor, window: int | None) -> Tensor:
    """Request by request over its context, in the precision of q, with the step's own k and v put in."""
    group = q.size(1) // k.size(1)
    outputs = []
    for request, (start, length, context) in enumerate(
        zip(case.lengths.query_starts, case.lengths.query_lens, case.lengths.seq_lens, strict=True)
    ):
        if length == 0:
            continue
        pages = case.batch.page_table[case.batch.req_rows[request]].long()[: -(-context // PAGE_SIZE)]
        keys, values = (
            cache[pages].flatten(0, 1)[:context].to(q.dtype) for cache in (case.k_cache, case.v_cache)
        )
        here = slice(start, start + length)
        keys[context - length :], values[context - length :] = k[here], v[here]
        seen = torch.arange(context, device=q.device)
        distance = seen[context - length :].unsqueeze(1) - seen
        visible = (distance >= 0) & (distance < (window or context + 1))
        is_causal = length == context and window is None
        mixed = functional.scaled_dot_product_attention(
            q[here].transpose(0, 1).unsqueeze(0),
            keys.repeat_interleave(group, dim=1).transpose(0, 1).unsqueeze(0),
            values.repeat_interleave(group, dim=1).transpose(0, 1).unsqueeze(0),
            attn_mask=None if is_causal or (length == 1 and window is None) else visible,
            is_causal=is_causal,
            scale=case.scale,
        )
        outputs.append(mixed[0].transpose(0, 1))
    return torch.cat(outputs)


def check_attention(
    device: torch.device,
    requests: list[tuple[int, int]],
    shape: tuple[int, int, int],
    *,
    max_query_len: int,
    window: int | None = None,
    normed: bool,
    from_heads: bool = True,
) -> None:
    """`attend_qkv`, and if `from_heads` also `write_kv` with `attend`, of one batch with padding."""
    num_heads, num_kv_heads, head_dim = shape
    random = Inputs(device, len(requests) + head_dim)
    case = make_case(
        requests,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        padded_tokens=2,
        padded_requests=2,
        slack_context=40,
        max_query_len=max_query_len,
        dtype=torch.bfloat16,
        device=device,
    )
    real = case.num_real_tokens
    heads = preparation(random, device, head_dim, normed)
    projected_rows = random(case.q.size(0), (num_heads + 2 * num_kv_heads) * head_dim)
    if not normed:
        projected_rows[:, : num_heads * head_dim] *= 3
    positions = case.batch.positions
    theirs = heads_of(projected_rows, heads, shape, positions)
    exact = heads_of(projected_rows.double(), heads, shape, positions)
    wanted = [attention(case, *tensors, window) for tensors in (theirs, exact)]
    about = (shape, requests[:9], len(requests), window, normed)

    backend = get_backend("auto", device)
    options = {"scale": case.scale, "sliding_window": window}
    k_cache, v_cache = case.k_cache.clone(), case.v_cache.clone()
    assert backend.attend_qkv is not None
    ours = backend.attend_qkv(
        projected_rows, heads, k_cache, v_cache, case.batch, num_heads=num_heads, **options
    )
    assert ours.isfinite().all(), "padded tokens"
    assert_accurate(ours[:real], *wanted, about)
    slots = case.batch.slots()[:real]
    assert_accurate(k_cache.flatten(0, 1)[slots], theirs[1][:real], exact[1][:real], (*about, "keys"))
    assert torch.equal(v_cache.flatten(0, 1)[slots], theirs[2][:real]), (*about, "values")

    if not from_heads:
        return
    q, k, v = theirs
    k_cache, v_cache = case.k_cache.clone(), case.v_cache.clone()
    backend.write_kv(k, v, k_cache, v_cache, case.batch)
    ours = backend.attend(q, k_cache, v_cache, case.batch, **options)
    exact_from_heads = attention(case, *(tensor.double() for tensor in theirs), window)
    assert_accurate(ours[:real], wanted[0], exact_from_heads, (*about, "from heads"))


@pytest.mark.parametrize("shape", HEADS, ids=str)
def test_decode_attention(device, shape):
    for num_tokens in TOKENS if shape in EVERY_BATCH else FEW_BATCHES:
        requests = [(context, 1) for context in contexts_of(num_tokens)]
        # Each compiles kernels of its own for a second or so; models come from rows.
        from_heads = shape in EVERY_BATCH
        normed = shape[1] % 2 == 0
        check_attention(device, requests, shape, max_query_len=1, normed=normed, from_heads=from_heads)


@pytest.mark.parametrize("context", CONTEXTS)
def test_decode_attention_of_one_token(device, context):
    check_attention(device, [(context, 1)], (16, 8, 128), max_query_len=1, normed=True)
    check_attention(device, [(context, 1)], (32, 8, 64), max_query_len=1, normed=False, window=100)


@pytest.mark.parametrize("shape", [(16, 8, 128), (32, 8, 64), (9, 3, 64), (32, 8, 80), (16, 8, 256)], ids=str)
@pytest.mark.parametrize("window", [None, 100])
def test_attention_of_prompts_and_mixed_batches(device, shape, window):
    mixed = [(1500, 1), (700, 200), (64, 64), (33, 1), (90, 0), (513, 2), (17, 17), (1, 1)]
    prompts = [(1, 1), (255, 255), (257, 257), (1000, 1000)]
    for requests in (mixed, prompts):
        check_attention(device, requests, shape, max_query_len=1024, normed=shape[2] != 64, window=window)
    if window is None:
        check_attention(device, [(4097, 511)], shape, max_query_len=512, normed=True)
