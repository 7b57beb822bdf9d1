"""A matrix product that a CPU's library may do slowly the way it is usually asked for.

On aarch64 `x @ weight.T` of a few rows is slower than `(weight @ x.T).T`: for 16 rows the four products of a
layer of SmolLM2-135M take 3.2 ms one way and 2.3 ms the other (torch 2.13, Neoverse N1, float32, 2 threads).
From 64 rows on nothing is gained, nor below 8; other machines were not measured.
"""

import platform

import torch
from torch import Tensor
from torch.nn import functional

_ON_ARM = platform.machine() in ("aarch64", "arm64")
_ROWS = range(8, 64)


def multiply(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`x @ weight.T + bias` of rows x [T, in] on a CPU."""
    if not _is_better_turned(x):
        return functional.linear(x, weight, bias)
    product = torch.mm(weight, x.t()).t().contiguous()
    return product if bias is None else product + bias


def multiply_somehow(x: Tensor, weight: Tensor) -> Tensor:
    """`x @ weight.T`; its columns may be what is contiguous."""
    return torch.mm(weight, x.t()).t() if _is_better_turned(x) else functional.linear(x, weight)


def _is_better_turned(x: Tensor) -> bool:
    return _ON_ARM and x.dtype == torch.float32 and x.size(0) in _ROWS
