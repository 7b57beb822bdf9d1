"""A shared prefix read once, on CUDA: kernels at real sizes, the engine's tests again, and whole steps."""

import json
from pathlib import Path

import pytest
import torch

from engine.conftest import tiny  # noqa: F401
from engine.test_engine_cascade import *  # noqa: F403
from engine.test_engine_cascade import _any_cascade_pays, replays, sharing  # noqa: F401
from kernels import fused_checks
from ostinato import LLM, SamplingParams
from ostinato.engine.stepping import shared_prefix
from ostinato.kernels.attention import cuda_decode, triton_decode

# (query heads, KV heads, head size)
QWEN3, LLAMA, QWEN2, PHI2 = (16, 8, 128), (32, 8, 64), (14, 2, 64), (32, 32, 80)
ODD_LENGTHS = [1, 2, 15, 16, 17, 31, 33, 64, 255, 256, 257, 600]
MODEL = Path(__file__).parents[2] / "benchmarks" / "models" / "qwen3-0.6b" / "config.json"


@pytest.fixture
def _only_cascades(monkeypatch):
    def refuse(*args: object) -> None:
        raise AssertionError("attention of each token by itself was asked for")

    monkeypatch.setattr(cuda_decode, "attend_tokens", refuse)
    attend = triton_decode.attend_tokens

    def attend_behind_prefix(*args: object) -> torch.Tensor:
        assert isinstance(args[3], torch.Tensor), "attention of each token by itself was asked for"
        return attend(*args)

    monkeypatch.setattr(triton_decode, "attend_tokens", attend_behind_prefix)


def check(device, pages, lengths, heads, *, norm=True, dtype=torch.bfloat16, parts=1):
    """So many shared pages, and these lengths behind them; padding behind the requests."""
    requests = [(16 * pages + length, 1) for length in lengths]
    fused_checks.check_attend_qkv(
        device, dtype, requests, heads, norm=norm, max_query_len=1, parts=parts, shared_pages=pages
    )


@pytest.mark.usefixtures("_only_cascades")
@pytest.mark.parametrize("pages", [0, 1, 2, 3, 7, 8, 64, 257])
def test_any_length_of_the_prefix(device, pages):
    check(device, pages, ODD_LENGTHS, QWEN3)


@pytest.mark.usefixtures("_only_cascades")
@pytest.mark.parametrize("num_requests", [1, 2, 5, 13, 29, 45, 61, 125, 253])
@pytest.mark.parametrize("heads", [QWEN3, QWEN2], ids=str)
def test_every_range_of_batch_sizes(device, num_requests, heads):
    check(device, 40, (ODD_LENGTHS * 22)[:num_requests], heads)


@pytest.mark.usefixtures("_only_cascades")
@pytest.mark.parametrize(
    ("heads", "norm", "dtype"),
    [
        (LLAMA, False, torch.bfloat16),
        (QWEN2, False, torch.float16),
        (PHI2, True, torch.bfloat16),
        (QWEN3, True, torch.float16),
        (QWEN3, True, torch.float32),
        ((7, 1, 80), False, torch.float32),
        ((32, 1, 128), False, torch.bfloat16),
    ],
    ids=str,
)
def test_heads_and_types(device, heads, norm, dtype):
    check(device, 33, ODD_LENGTHS, heads, norm=norm, dtype=dtype)


@pytest.mark.usefixtures("_only_cascades")
def test_rows_in_parts(device):
    check(device, 33, ODD_LENGTHS, QWEN3, parts=3)


@pytest.fixture(scope="module")
def qwen(tmp_path_factory):
    """Three layers of Qwen3-0.6B."""
    directory = tmp_path_factory.mktemp("qwen3")
    config = json.loads(MODEL.read_text()) | {"num_hidden_layers": 3}
    (directory / "config.json").write_text(json.dumps(config))
    options = {"max_model_len": 2048, "max_running_requests": 40, "cuda_graph_bs": (8, 24, 40)}
    options |= {"chunked_prefill_size": 1024, "cuda_graph_prefill_tokens": (256, 1024), "num_pages": 600}
    with LLM(str(directory), load_format="dummy", enable_cascade_attention=True, **options) as llm:
        yield llm


@pytest.mark.parametrize("num_requests", [5, 8, 20, 37])
def test_bf16_steps_say_the_same_as_plain_ones_up_to_rounding(qwen, num_requests, monkeypatch):
    prompts = sharing(700, range(1, num_requests + 1), seed=num_requests)
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, logprobs=5)
    found = {}
    for kind, least_saved in (("plain", 1 << 60), ("cascade", 1)):
        monkeypatch.setattr(shared_prefix, "LEAST_SAVED_BYTES", least_saved)
        qwen.generate(prompts, params)  # from here on prompts are in the cache
        before = replays(qwen)
        found[kind] = [output.outputs[0] for output in qwen.generate(prompts, params)]
        new = replays(qwen) - before
        assert (new["cascade"] >= 18) == (kind == "cascade"), new
        assert (new["decode"] >= 18) == (kind == "plain"), new
    assert not qwen.graph_report().eager_steps
    num_equal = 0
    for plain, cascade in zip(found["plain"], found["cascade"], strict=True):
        for at, (wanted, token) in enumerate(zip(plain.token_ids, cascade.token_ids, strict=True)):
            likely = plain.logprobs[at]
            assert token in likely, "not even likely"
            assert abs(likely[token].logprob - cascade.logprobs[at][token].logprob) < 0.1
            if token != wanted:  # a near tie; what follows has another context
                assert likely[wanted].logprob - likely[token].logprob < 0.1
                break
            num_equal += 1
    assert num_equal >= 3 * num_requests, "ties are rare"


def test_the_same_bits_again(qwen, monkeypatch):
    """Captured graphs, and no atomics: nothing in a cascade depends on the order of programs."""
    monkeypatch.setattr(shared_prefix, "LEAST_SAVED_BYTES", 1)
    prompts = sharing(700, range(1, 21), seed=2)
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, logprobs=1)
    runs = [qwen.generate(prompts, params) for _ in range(3)]
    for first, again in zip(runs[1], runs[2], strict=True):
        assert first.outputs[0].token_ids == again.outputs[0].token_ids
        assert first.outputs[0].logprobs == again.outputs[0].logprobs
