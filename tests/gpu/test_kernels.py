"""Kernels on the GPU: attention against dense float64, in graphs and out of them; sampling as on a CPU."""

import dataclasses
import functools

import pytest
import torch

from kernels.paged_cases import Case, dense_attention, make_case, written_caches
from kernels.test_sampling import Chosen
from ostinato.graphs import CaptureOptions, graphed
from ostinato.kernels.attention import AttentionBatch, get_backend
from ostinato.kernels.sampling import torch_reference

TOLERANCE = {torch.float32: 3e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}

# (context, query) lengths and the longest query the graph allows.
BATCHES = {
    "decode": ([(1, 1), (17, 1), (256, 1), (257, 1), (1000, 1), (2049, 1), (4096, 1)], 1),
    "short": ([(1, 1), (16, 1), (31, 1), (200, 1)], 1),
    "prompts": ([(300, 300), (129, 129), (1, 1)], 512),
    "mixed": ([(1500, 1), (700, 200), (64, 64), (33, 1), (90, 0), (513, 2)], 256),
    "speculative": ([(1500, 4), (4, 4), (260, 4)], 4),
}
# (query heads, KV heads, head size), as in Qwen2-0.5B, Llama-3 8B, Phi-2, Phi-3-mini.
QWEN2, LLAMA3, PHI2, PHI3 = (14, 2, 64), (32, 8, 128), (32, 32, 80), (32, 32, 96)


def poisoned_case(device: torch.device, name: str, shape: tuple[int, int, int], dtype: torch.dtype) -> Case:
    requests, max_query_len = BATCHES[name]
    return make_case(
        requests,
        num_heads=shape[0],
        num_kv_heads=shape[1],
        head_dim=shape[2],
        padded_tokens=5,
        padded_requests=5,
        slack_context=100,
        max_query_len=max_query_len,
        dtype=dtype,
        device=device,
        poison=float("nan"),
    )


def step(case: Case, backend: str, window: int | None = None) -> torch.Tensor:
    functions = get_backend(backend, case.q.device)
    k_cache, v_cache = case.k_cache.clone(), case.v_cache.clone()
    functions.write_kv(case.k, case.v, k_cache, v_cache, case.batch)
    return functions.attend(case.q, k_cache, v_cache, case.batch, scale=case.scale, sliding_window=window)


def assert_close(case: Case, out: torch.Tensor, wanted: torch.Tensor) -> None:
    tolerance = TOLERANCE[case.q.dtype]
    torch.testing.assert_close(out[: case.num_real_tokens].double(), wanted, atol=tolerance, rtol=tolerance)


# Few combinations on purpose: each compiles kernels of its own for a second or so.
@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("name", BATCHES)
def test_triton_equals_dense_attention(device, name, window):
    case = poisoned_case(device, name, QWEN2, torch.bfloat16)
    out = step(case, "triton", window)
    assert out.isfinite().all()
    assert_close(case, out, dense_attention(case, window))


@pytest.mark.parametrize("name", ["decode", "mixed"])
@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        (LLAMA3, torch.bfloat16),
        (PHI2, torch.bfloat16),
        (PHI3, torch.bfloat16),
        (QWEN2, torch.float16),
        (LLAMA3, torch.float32),
    ],
    ids=str,
)
def test_triton_serves_the_heads_and_types_of_real_models(device, name, shape, dtype):
    case = poisoned_case(device, name, shape, dtype)
    assert_close(case, step(case, "triton"), dense_attention(case))


@pytest.mark.parametrize("name", BATCHES)
def test_the_reference_is_right_on_a_gpu_too(device, name):
    case = poisoned_case(device, name, (4, 2, 64), torch.float32)
    case = dataclasses.replace(case, k_cache=case.k_cache.nan_to_num(), v_cache=case.v_cache.nan_to_num())
    assert_close(case, step(case, "torch"), dense_attention(case))
    eager = get_backend("torch", device).attend_eager
    k_cache, v_cache = written_caches(case)
    out = eager(case.q, k_cache, v_cache, case.batch, scale=case.scale, lengths=case.lengths)
    assert_close(case, out, dense_attention(case))


def test_a_gpu_gets_triton(device):
    assert get_backend("auto", device).name == "triton"


@pytest.mark.parametrize("backend", ["triton", "torch"])
@pytest.mark.parametrize("name", ["decode", "mixed"])
def test_one_graph_serves_any_lengths_of_its_rung(device, backend, name):
    """Captured on padding alone, replayed with real requests: grids follow the rung, lengths the buffers."""
    dtype = torch.bfloat16 if backend == "triton" else torch.float32
    case = poisoned_case(device, name, QWEN2, dtype)
    k_cache, v_cache = case.k_cache.nan_to_num(), case.v_cache.nan_to_num()
    functions = get_backend(backend, device)

    def captured(q, k, v, token_rows, positions, page_table, req_rows, seq_lens, query_starts, query_lens):
        batch = AttentionBatch(
            page_table,
            token_rows,
            positions,
            req_rows,
            seq_lens,
            query_starts,
            query_lens,
            case.batch.max_query_len,
            case.batch.max_context,
        )
        functions.write_kv(k, v, k_cache, v_cache, batch)
        return functions.attend(q, k_cache, v_cache, batch, scale=case.scale)

    shared = ("page_table", "req_rows", "seq_lens", "query_starts", "query_lens")
    pads = {"token_rows": 0, "positions": 0}  # page 0 is padding's
    options = CaptureOptions(strict=True)
    function = graphed(captured, ladder=[case.q.size(0)], shared=shared, pads=pads, options=options)
    tokens = (case.q, case.k, case.v, case.batch.token_rows, case.batch.positions)
    requests = [getattr(case.batch, field) for field in shared]
    idle = [torch.zeros_like(tensor) for tensor in requests]
    idle[2] += 1
    function.capture(*(torch.zeros_like(tensor) for tensor in tokens), *idle)
    assert_close(case, function(*tokens, *requests), dense_attention(case))
    assert not function.report().eager_steps


def test_attention_of_a_request_does_not_depend_on_its_company(device):
    """Bitwise, at an equal number of tokens: where splits begin follows from the request alone."""
    case = poisoned_case(device, "decode", QWEN2, torch.bfloat16)
    out = step(case, "triton")
    for token in range(case.num_real_tokens):
        others = torch.arange(case.q.size(0), device=device) != token
        batch = dataclasses.replace(
            case.batch,
            token_rows=case.batch.token_rows.masked_fill(others, 0),
            positions=case.batch.positions.masked_fill(others, 0),
            query_lens=case.batch.query_lens.masked_fill(others, 0),
        )
        again = step(dataclasses.replace(case, batch=batch), "triton")
        assert torch.equal(again[token], out[token])


# -- sampling --------------------------------------------------------------------------------------


@functools.cache
def sampling_inputs(n: int, vocab: int) -> tuple[torch.Tensor, Chosen, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    settings = Chosen(
        temperature=(torch.rand(n, generator=generator) * 2 - 0.5).clamp(min=0),
        top_k=torch.randint(0, 100, (n,), generator=generator, dtype=torch.int32),
        top_p=torch.rand(n, generator=generator) * 0.5 + 0.5,
        min_p=torch.rand(n, generator=generator) / 10,
        seeds=torch.randint(-(1 << 62), 1 << 62, (n,), generator=generator),
    )
    logits = torch.randn(n, vocab, generator=generator) * 4
    return logits, settings, torch.randint(0, 100_000, (n,), generator=generator)


def to_device(settings: Chosen, device: torch.device) -> Chosen:
    return Chosen(*(value.to(device) for value in settings))


def test_random_bits_are_the_same_on_every_device(device):
    _, settings, positions = sampling_inputs(64, 5000)
    on_gpu = torch_reference.uniform(settings.seeds.to(device), positions.to(device), 5000)
    assert torch.equal(on_gpu.cpu(), torch_reference.uniform(settings.seeds, positions, 5000))


def test_sampling_draws_what_the_cpu_draws(device):
    """Up to tokens at the very edge of a filter, where the last bits of a logarithm or a sum decide."""
    logits, settings, positions = sampling_inputs(64, 5000)
    on_gpu = (logits.to(device), *to_device(settings, device), positions.to(device))
    same = torch_reference.sample(*on_gpu).cpu() == torch_reference.sample(logits, *settings, positions)
    assert same.float().mean() > 0.95


def test_sampling_is_captured_at_a_real_vocabulary(device):
    n, vocab = 16, 151_936
    logits, settings, positions = sampling_inputs(n, vocab)
    logits, settings, positions = logits.to(device), to_device(settings, device), positions.to(device)
    counts = torch.zeros(n + 1, vocab, dtype=torch.int32, device=device)

    def captured(logits, positions, rows, temperature, top_k, top_p, min_p, seeds):
        ones, times = torch.ones_like(temperature), counts.index_select(0, rows)
        penalties = (ones * 1.1, ones * 0.2, ones * 0.1)
        changed = torch_reference.apply_penalties(logits, *penalties, times, times < 0)
        tokens = torch_reference.sample(changed, temperature, top_k, top_p, min_p, seeds, positions)
        torch_reference.count_tokens(counts, rows, tokens)
        logprobs = torch_reference.token_logprobs(logits, tokens, 5)
        return tokens, logprobs.chosen, logprobs.top_tokens, logprobs.top

    rows = torch.arange(1, n + 1, dtype=torch.int32, device=device)
    # Row 0 is padding's.
    function = graphed(captured, ladder=[n], pads={"rows": 0}, options=CaptureOptions(strict=True))
    for shift in range(3):
        before = counts.clone()
        replayed = [part.clone() for part in function(logits, positions + shift, rows, *settings)]
        counts.copy_(before)
        eager = captured(logits, positions + shift, rows, *settings)
        for part, wanted in zip(replayed, eager, strict=True):
            torch.testing.assert_close(part, wanted, atol=1e-5, rtol=1e-5)
    assert counts.sum().item() == 3 * n
    assert not function.report().eager_steps
