"""Decode attention in CUDA C++: right for all heads and lengths, and the same bits for the same request."""

import dataclasses

import pytest
import torch

from kernels import fused_checks
from kernels.paged_cases import Case, make_case
from ostinato.kernels.attention import HeadPreparation, choice, cuda_decode, gpu_ops, triton_decode
from ostinato.kernels.cuda import compiled

# (query heads, KV heads, head size)
QWEN3, LLAMA, QWEN2, PHI2, PHI3 = (16, 8, 128), (32, 8, 64), (14, 2, 64), (32, 32, 80), (32, 32, 96)
ODD_LENGTHS = [1, 2, 15, 16, 17, 31, 33, 255, 256, 257, 272, 1000, 2049, 4096]


@pytest.fixture(autouse=True)
def only_cuda(device, monkeypatch):
    """A GPU that has the kernel, and no way around it."""
    if not compiled.is_supported(device):
        pytest.skip("needs compute capability 9.0 and NVRTC")

    def refuse(*args: object) -> None:
        raise AssertionError("Triton was asked")

    monkeypatch.setattr(triton_decode, "attend_tokens", refuse)


def check(device, lengths, heads, *, norm=True, dtype=torch.bfloat16, window=None):
    requests = [(length, 1) for length in lengths]
    fused_checks.check_attend_qkv(device, dtype, requests, heads, norm=norm, max_query_len=1, window=window)


@pytest.mark.parametrize("group", range(1, 17))
def test_any_number_of_query_heads_to_a_kv_head(device, group):
    check(device, ODD_LENGTHS, (2 * group, 2, 128 if group % 2 else 64), norm=group % 3 == 0)


@pytest.mark.parametrize("num_requests", [1, 2, 5, 14, 29, 61, 253, 300])
@pytest.mark.parametrize("window", [None, 1, 100])
def test_every_range_of_batch_sizes(device, num_requests, window):
    lengths = (ODD_LENGTHS * 22)[-num_requests:]
    check(device, lengths, QWEN3, window=window)


@pytest.mark.parametrize(
    ("heads", "norm", "dtype"),
    [
        (LLAMA, False, torch.bfloat16),
        (QWEN2, False, torch.float16),
        (PHI2, True, torch.bfloat16),
        (PHI3, False, torch.float16),
        (QWEN3, True, torch.float16),
    ],
    ids=str,
)
def test_heads_and_types_of_real_models(device, heads, norm, dtype):
    check(device, ODD_LENGTHS, heads, norm=norm, dtype=dtype)


@pytest.mark.parametrize("lengths", [[32_768], [20_001, 3, 32_000, 77], [100] * 200 + [30_000]], ids=len)
def test_long_contexts(device, lengths):
    check(device, lengths, QWEN3)


def test_random_mixtures(device):
    for seed, num_requests in enumerate((3, 16, 40, 100, 256)):
        generator = torch.Generator().manual_seed(seed)
        check(device, torch.randint(1, 900, (num_requests,), generator=generator).tolist(), QWEN3)


@dataclasses.dataclass(frozen=True)
class Layer:
    """A case with its preparation, ready to attend; padded tokens included."""

    case: Case
    rows: torch.Tensor
    heads: HeadPreparation

    @classmethod
    def make(cls, device: torch.device, lengths: list[int], seed: int = 0) -> "Layer":
        num_heads, num_kv_heads, head_dim = QWEN3
        case = make_case(
            [(length, 1) for length in lengths],
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            padded_tokens=2,
            max_query_len=1,
            dtype=torch.bfloat16,
            device=device,
            seed=seed,
        )
        generator = torch.Generator(device).manual_seed(seed)
        width = (num_heads + 2 * num_kv_heads) * head_dim
        rows = torch.randn(len(lengths) + 2, width, generator=generator, device=device).bfloat16()
        angles = torch.randn(case.batch.max_context, head_dim // 2, generator=generator, device=device)
        norm = torch.rand(head_dim, generator=generator, device=device).bfloat16()
        return cls(case, rows, HeadPreparation(torch.cat([angles.cos(), angles.sin()], dim=1), norm, norm))

    def attend(self) -> torch.Tensor:
        case = self.case
        return gpu_ops.attend_qkv(
            self.rows, self.heads, case.k_cache, case.v_cache, case.batch, num_heads=16, scale=case.scale
        )


MANY = [(97 * i) % 1500 + 1 for i in range(150)]


@pytest.mark.parametrize("lengths", [[700], [1500, 20, 300], MANY], ids=len)
def test_replays_in_a_graph_give_the_same_bits(device, lengths):
    """Counters are back at zero after every launch, and layers that overlap do not disturb each other."""
    layers = [Layer.make(device, lengths, seed) for seed in range(4)]
    wanted = [layer.attend().clone() for layer in layers]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = [layer.attend() for layer in layers]
    for _ in range(30):
        for out in outs:
            out.fill_(float("nan"))
        graph.replay()
        for out, want in zip(outs, wanted, strict=True):
            assert torch.equal(out, want)
    assert not any(cuda_decode.counters_of(layer.case.k_cache).any() for layer in layers)


@pytest.mark.parametrize("num_tokens", [4, 24, 64, 200])
def test_a_request_has_the_same_bits_beside_any_others(device, num_tokens):
    """Where contexts are cut follows from the position and the number of tokens alone."""
    layer = Layer.make(device, [1237] + [900] * (num_tokens - 3))
    batch = layer.case.batch
    wanted = layer.attend()[0].clone()
    for position_of_others in (899, 450, 0):
        positions = batch.positions.clone()
        positions[1:-2] = position_of_others
        for place in (0, num_tokens // 2, num_tokens - 2):
            order = torch.arange(num_tokens, device=device)
            order[0], order[place] = place, 0
            moved = dataclasses.replace(batch, positions=positions[order], token_rows=batch.token_rows[order])
            case = dataclasses.replace(layer.case, batch=moved)
            out = dataclasses.replace(layer, case=case, rows=layer.rows[order]).attend()
            assert torch.equal(out[place], wanted)


def test_what_it_does_not_serve(device):
    def serves(dtype=torch.bfloat16, heads=QWEN3, num_tokens=4) -> bool:
        num_heads, num_kv_heads, head_dim = heads
        rows = torch.zeros(num_tokens, (num_heads + 2 * num_kv_heads) * head_dim, dtype=dtype, device=device)
        cache = torch.zeros(2, 16, num_kv_heads, head_dim, dtype=dtype, device=device)
        return cuda_decode.serves(rows, HeadPreparation(rows.float()), cache, num_heads)

    assert serves()
    assert not serves(dtype=torch.float32)
    assert not serves(heads=(34, 2, 64))
    assert not serves(heads=(4, 2, 72))
    assert not serves(heads=(4, 2, 256))
    assert not serves(num_tokens=choice.CUDA_MAX_TOKENS[-1] + 1)
