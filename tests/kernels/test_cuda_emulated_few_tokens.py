"""Attention of a few tokens of each request by `decode_attention.cu`, in the emulator."""

import random
from dataclasses import replace

import pytest
import torch

from kernels.cuda_emulator.emulated import MAY_SKIP, Emulator
from kernels.emulated_checks import H200_MULTIPROCESSORS, check_few_tokens
from ostinato.kernels.attention.choice import CudaDecodeTile

pytestmark = pytest.mark.skipif(MAY_SKIP, reason="needs g++")

WHOLE = CudaDecodeTile(2, 4, 1, chunk_tiles=16, max_chunks=1)
CUT = CudaDecodeTile(4, 5, 2, chunk_tiles=2, max_chunks=4)
END = CudaDecodeTile(8, 4, 1, chunk_tiles=2, max_chunks=16)
LLAMA = (8, 2, 64)
QWEN = (4, 2, 128)


@pytest.fixture(scope="module")
def emulator(tmp_path_factory):
    return Emulator(tmp_path_factory.mktemp("kernels"))


BATCHES = {
    "five tokens": (CUT, LLAMA, [(5, 5), (16, 5), (18, 5), (34, 5), (200, 5), (64, 5)], 5, {}),
    "fewer than places": (CUT, LLAMA, [(1, 1), (17, 2), (33, 4), (90, 3), (32, 5)], 5, {"norm": False}),
    "few programs": (CUT, LLAMA, [(50, 5), (7, 5), (129, 5), (16, 4)], 5, {"multiprocessors": 1}),
    "a window": (CUT, LLAMA, [(3, 3), (60, 5), (130, 5)], 5, {"window": 9, "multiprocessors": 2}),
    "a window of one": (CUT, LLAMA, [(60, 5), (33, 5)], 5, {"window": 1}),
    "two tokens, float16": (WHOLE, (4, 2, 64), [(2, 2), (17, 2), (40, 1)], 2, {"dtype": torch.float16}),
    "two pages": (WHOLE, (2, 1, 32), [(16, 16), (30, 16), (47, 16), (90, 9)], 16, {}),
    "rows in parts": (CUT, LLAMA, [(33, 5), (70, 5)], 5, {"parts": 3}),
    "the end of a prompt": (END, QWEN, [(700, 16)], 16, {}),
    "a shorter end": (END, QWEN, [(517, 11)], 16, {}),
    "the end of a short prompt": (END, QWEN, [(12, 12)], 16, {"parts": 2}),
    "seven heads": (CUT, (7, 1, 80), [(33, 4), (70, 2)], 4, {}),
}


@pytest.mark.parametrize("name", BATCHES)
def test_a_few_tokens_of_each_request(emulator, name):
    tile, heads, requests, places, options = BATCHES[name]
    check_few_tokens(emulator, tile, heads, requests, places, **options)


def test_random_batches(emulator):
    """With a kernel of `BATCHES`, which is compiled: how contexts are cut is no constant of it."""
    for seed in range(12):
        chance = random.Random(seed)
        requests = []
        for _ in range(chance.choice([1, 2, 5, 12])):
            count = chance.randint(1, 5)
            requests.append(
                (count + chance.choice([0, chance.randint(0, 40), chance.randint(0, 300)]), count)
            )
        check_few_tokens(
            emulator,
            replace(CUT, chunk_tiles=chance.choice([1, 2, 3, 8]), max_chunks=chance.choice([1, 2, 4, 8])),
            LLAMA,
            requests,
            5,
            multiprocessors=chance.choice([1, 3, H200_MULTIPROCESSORS]),
            window=chance.choice([None, None, 1, 17, 50]),
        )
