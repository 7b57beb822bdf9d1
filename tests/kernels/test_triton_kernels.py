"""The Triton kernels without a GPU: right in the interpreter, and accepted by the compiler for Hopper."""

import os
import subprocess
import sys

import pytest
import torch

triton = pytest.importorskip("triton")

# Triton 3.6's interpreter with NumPy 2.4: a fault of that pair, not of a kernel.
KNOWN_INTERPRETER_FAULT = "only 0-dimensional arrays can be converted to Python scalars"

POINTERS = {torch.float32: "*fp32", torch.float16: "*fp16", torch.bfloat16: "*bf16"}


def test_kernels_are_right_in_the_interpreter():
    """In a process of its own: the interpreter is chosen when a kernel is defined."""
    environment = {
        **os.environ,
        "TRITON_INTERPRET": "1",
        "PYTHONPATH": os.pathsep.join(p for p in sys.path if p),
    }
    result = subprocess.run(
        [sys.executable, "-m", "kernels.triton_interpreter_checks"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=110,
    )
    if KNOWN_INTERPRETER_FAULT in result.stderr:
        pytest.skip(f"Triton {triton.__version__}'s interpreter does not work with this NumPy")
    assert "all checks passed" in result.stdout, result.stdout + result.stderr[-4000:]


def compiled(kernel, types, constants, **options):
    """The kernel's binary for compute capability 9.0."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    places = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    source = ASTSource(kernel, types | dict.fromkeys(constants, "constexpr"), constexprs=places)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["cubin"]


@pytest.mark.parametrize(
    ("dtype", "max_query_len", "window", "head_dim"),
    [(torch.bfloat16, 1, 0, 128), (torch.bfloat16, 256, 64, 80), (torch.float32, 256, 0, 64)],
    ids=str,
)
def test_kernels_compile_for_hopper(dtype, max_query_len, window, head_dim):
    from ostinato.kernels.attention import triton_paged as kernels

    if kernels.INTERPRETED:
        pytest.skip("TRITON_INTERPRET is set: there is nothing to compile")
    num_heads, num_kv_heads, max_context = 14, 2, 4096
    pointer = POINTERS[dtype]
    split_len, num_splits = kernels._splits(max_query_len, max_context)
    query_block, group_block, key_block = kernels._tile(max_query_len, num_heads // num_kv_heads, dtype)
    dim_block = triton.next_power_of_2(head_dim)
    lengths = dict.fromkeys(("seq_lens", "query_starts", "query_lens"), "*i32")
    partial = dict.fromkeys(("partial", "partial_lse"), "*fp32")
    split = {"window": window, "split_len": split_len, "num_splits": num_splits}
    assert compiled(
        kernels._attend,
        dict.fromkeys(("q", "k_cache", "v_cache", "out"), pointer)
        | (partial if num_splits > 1 else dict.fromkeys(partial, pointer))
        | {"page_table": "*i32", "req_rows": "*i32", **lengths, "scale": "fp32"}
        | dict.fromkeys(("q_token_stride", "q_head_stride", "page_table_stride"), "i32"),
        {"num_heads": num_heads, "num_kv_heads": num_kv_heads, "head_dim": head_dim, "page_size": 16, **split}
        | {"query_block": query_block, "group_block": group_block, "key_block": key_block}
        | {"dim_block": dim_block},
        num_warps=4,
        num_stages=2,
    )
    if num_splits > 1:
        assert compiled(
            kernels._combine_splits,
            {**partial, "out": pointer, **lengths},
            {"num_heads": num_heads, "head_dim": head_dim, **split}
            | {"split_block": triton.next_power_of_2(num_splits), "dim_block": dim_block},
        )
    strides = ("k_token_stride", "k_head_stride", "v_token_stride", "v_head_stride", "page_table_stride")
    assert compiled(
        kernels._write_kv,
        dict.fromkeys(("k", "v", "k_cache", "v_cache"), pointer)
        | {"page_table": "*i32", "token_rows": "*i32", "positions": "*i64"}
        | dict.fromkeys(strides, "i32"),
        {"num_kv_heads": num_kv_heads, "head_dim": head_dim, "page_size": 16}
        | {"block": triton.next_power_of_2(num_kv_heads * head_dim)},
    )
