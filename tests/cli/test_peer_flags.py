"""Command lines of vLLM and SGLang become ours."""

import pytest

from ostinato.cli.peer_flags import OwnFlag, rewritten
from ostinato.graphs.errors import ConfigError

OWN = {
    **dict.fromkeys(
        ["--model", "--device", "--port", "--max-model-len", "--max-running-requests"], OwnFlag()
    ),
    **dict.fromkeys(
        ["--chunked-prefill-size", "--mem-fraction", "--seed", "--num-pages", "--dtype"], OwnFlag()
    ),
    **dict.fromkeys(["--cuda-graph-mode", "--attention-backend", "--steps-ahead"], OwnFlag()),
    **dict.fromkeys(["--cuda-graph-bs", "--cudagraph-capture-sizes"], OwnFlag(is_numbers=True)),
    **dict.fromkeys(["--api-key", "--stop"], OwnFlag(may_repeat=True)),
    **dict.fromkeys(["--disable-cuda-graph", "--no-disable-cuda-graph"], OwnFlag(takes_value=False)),
    **dict.fromkeys(["--enable-prefix-caching", "--no-enable-prefix-caching"], OwnFlag(takes_value=False)),
    **dict.fromkeys(["--enable-chunked-prefill", "--raw"], OwnFlag(takes_value=False)),
}


def line(text: str) -> list[str]:
    return rewritten(text.split(), OWN, for_server=True)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("M --port 8000", "M --port=8000"),
        ("--port=8000 --raw M", "--port=8000 --raw M"),
        ("M --gpu-memory-utilization 0.5", "M --mem-fraction=0.5"),
        ("M --gpu_memory_utilization=0.5", "M --mem-fraction=0.5"),
        ("M --mem-fraction-static 0.5", "M --mem-fraction=0.5"),
        ("--model-path M --context-length 4096", "--model=M --max-model-len=4096"),
        (
            "M --max-model-len 4k --max-num-batched-tokens 8K",
            "M --max-model-len=4000 --chunked-prefill-size=8192",
        ),
        ("M --max-model-len auto", "M"),
        ("M --max-model-len -1", "M"),
        ("M --enforce-eager", "M --disable-cuda-graph"),
        ("M --no-enforce-eager", "M --no-disable-cuda-graph"),
        ("M --enforce-eager=false", "M --no-disable-cuda-graph"),
        ("M --disable-radix-cache", "M --no-enable-prefix-caching"),
        ("M --no-enable-prefix-caching", "M --no-enable-prefix-caching"),
        ("M --chunked-prefill-size -1", "M --no-enable-chunked-prefill"),
        ("M --chunked-prefill-size 512", "M --chunked-prefill-size=512"),
        ("M -tp 1 --tp 1 --dp-size=1 -dp 1 --pipeline-parallel-size 1", "M"),
        ("M --dtype half --attention-backend TRITON_ATTN", "M --attention-backend=triton --dtype=float16"),
        ("M --cuda-graph-bs 1 2 4 --raw", "M --cuda-graph-bs=1,2,4 --raw"),
        ("--cuda-graph-bs 1,2 4 M", "--cuda-graph-bs=1,2,4 M"),
        ("M --cuda-graph-sizes [1,2,4]", "M --cudagraph-capture-sizes=1,2,4"),
        ("M --api-key a b --raw", "M --api-key=a --api-key=b --raw"),
        ("--api-key a M", "--api-key=a M"),
        ("--model M --api-key a b", "--model=M --api-key=a --api-key=b"),
        ("M -cc.cudagraph_mode=NONE", "M --cuda-graph-mode=NONE"),
        ("M -O3", "M"),
        ("M --compilation-config.cudagraph-capture-sizes [1,2]", "M --cudagraph-capture-sizes=1,2"),
        ("M --max-total-tokens 1000", "M --num-pages=64"),
        ("M --base-gpu-id 1", "M --device=cuda:1"),
        ("M --no-async-scheduling", "M --steps-ahead=0"),
        ("M --trust-remote-code --random-seed 3", "M --seed=3"),
        ("M --unknown 3", "M --unknown 3"),
        ("--seed -1 -", "--seed=-1 -"),
        ("M --enforce-eager -- --raw", "M --disable-cuda-graph -- --raw"),
    ],
)
def test_a_command_line_becomes_ours(given: str, expected: str) -> None:
    words = expected.split()
    found = line(given)
    assert sorted(found) == sorted(words)
    assert [word for word in found if word in ("M", "--", "-")] == [
        word for word in words if word in ("M", "--", "-")
    ]


def test_a_json_object_becomes_ours() -> None:
    config = '{"cudagraph_mode": "FULL", "cudagraph_capture_sizes": [1, 2], "level": 3}'
    found = rewritten(["M", "--compilation-config", config], OWN)
    assert sorted(found) == ["--cuda-graph-mode=FULL", "--cudagraph-capture-sizes=1,2", "M"]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("--tensor-parallel-size 2", "--tensor-parallel-size can only be 1, not 2: one engine uses one GPU"),
        ("--tp 2", "--tp can only be 1"),
        ("--quantization fp8", "--quantization is not supported: weights are"),
        ("-q awq", "-q is not supported"),
        ("--kv-cache-dtype fp8", "--kv-cache-dtype can only be auto, not 'fp8'"),
        ("--speculative-config {}x", "is not JSON"),
        ("--reasoning-parser qwen3", "--reasoning-parser is not supported: reasoning stays in the text"),
        ("--max-num-seqs many", "--max-num-seqs: 'many' is not a whole number"),
        ("--max-num-seqs", "--max-num-seqs needs a value"),
        ("--max-num-seqs 4 --max-num-seqs", "needs a value"),
        ("--enforce-eager=maybe", "--enforce-eager must be true or false, not 'maybe'"),
        ("--gpu-memory-utilization 0.5 --mem-fraction-static 0.6", "not both: they mean the same"),
        ("--mem-fraction 0.5 --gpu-memory-utilization 0.5", "--mem-fraction was given twice, once as --gpu-"),
        ("-cc.splitting=1", "compilation_config: 'splitting' is not supported"),
        ("--enable-lora-bias", "--enable-lora-bias is not supported: adapters with biases"),
        ("--stream-interval 2", "--stream-interval is not an option of this command"),
    ],
)
def test_what_cannot_be_had_is_refused_by_name(given: str, message: str) -> None:
    own = {name: flag for name, flag in OWN.items() if name != "--stream-interval"}
    with pytest.raises(ConfigError, match=message):
        rewritten(["M", *given.split()], own, for_server=True)


def test_an_option_of_the_server_is_refused_elsewhere() -> None:
    with pytest.raises(ConfigError, match="--host is an option of the server"):
        rewritten(["--host", "0.0.0.0"], {})
