"""Runs in a process with TRITON_INTERPRET=1 (see `test_window_pages`).

python -m kernels.window_interpreter_checks few|all
"""

import sys

import torch

from kernels.fused_checks import check_attend_qkv
from kernels.window_cases import beginnings_gone

ALL = sys.argv[1:] == ["all"]
DECODE = [(300, 1), (150, 1), (7, 1), (257, 1)] if ALL else [(150, 1)]
MIXED = [(200, 1), (300, 19), (9, 9), (277, 2)] if ALL else [(140, 3)]

if __name__ == "__main__":
    for window in (1, 9, 70) if ALL else (9,):
        for requests, longest in ((DECODE, 1), (MIXED, 24)):
            heads = (4, 2, 16) if ALL else (1, 1, 16)
            with beginnings_gone(window):
                check_attend_qkv(
                    "cpu", torch.float32, requests, heads, norm=True, max_query_len=longest, window=window
                )
            print(f"window {window}, queries of up to {longest}", flush=True)
    print("all checks passed")
