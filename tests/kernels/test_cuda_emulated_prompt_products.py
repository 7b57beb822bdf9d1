"""`prompt_product.cu` and what launches it, without a GPU: right in the emulator."""

import random
from itertools import count

import pytest
import torch
from torch.nn import functional

pytest.importorskip("triton")

from kernels.cuda_emulator.emulated import MAY_SKIP, Emulator
from kernels.emulated_checks import random_bf16
from ostinato.kernels.gpu import Gpu
from ostinato.kernels.linear import cuda_prompt
from ostinato.kernels.linear import ops as linear_ops

pytestmark = pytest.mark.skipif(MAY_SKIP, reason="needs g++")


@pytest.fixture(scope="module")
def emulator(tmp_path_factory):
    return Emulator(tmp_path_factory.mktemp("kernels"))


@pytest.fixture(autouse=True)
def _small_gpu(emulator, monkeypatch):
    """Programs have several tiles each, of which few go together."""
    monkeypatch.setattr(cuda_prompt, "cuda_kernel", emulator.kernel)
    monkeypatch.setattr(cuda_prompt, "gpu_of", lambda _: Gpu((9, 0), 2))
    monkeypatch.setattr(cuda_prompt, "_TOGETHER", 512)


def check(num_tokens, width, columns, *, gated=False, added=False, bias=False):
    """Against float64, rounded where steps of their own would round; nothing else is written."""
    x = random_bf16(num_tokens, 2 * columns)[:, :columns]  # rows that lie apart
    weight = random_bf16(width * (2 if gated else 1), columns, scale=columns**-0.5)
    shift = random_bf16(weight.size(0)) if bias else None
    room = random_bf16(num_tokens + 1, width)
    before, out = room.clone(), room[:num_tokens]
    cuda_prompt.launch_prompt(x, weight, shift, out, added=added)
    product = functional.linear(x.double(), weight.double(), None if shift is None else shift.double())
    wanted = product.bfloat16()
    if gated:
        gate, up = wanted.chunk(2, dim=-1)
        wanted = (functional.silu(gate.float()).bfloat16().float() * up.float()).bfloat16()
    if added:
        wanted = before[:num_tokens] + wanted
    assert (out == wanted).float().mean() > 0.995, "but for sums on the edge between two roundings"
    torch.testing.assert_close(out.float(), wanted.float(), rtol=0.02, atol=0.04)
    assert torch.equal(room[num_tokens], before[num_tokens]), "wrote behind the last token"


CASES = {
    "groups of unequal height": ((520, 264, 72), {"bias": True}),
    "gated": ((300, 136, 192), {"gated": True, "bias": True}),
    "added, more steps than places": ((200, 264, 328), {"added": True}),
    "fewer steps than the lead": ((130, 64, 64), {}),
}


@pytest.mark.parametrize("name", CASES)
def test_a_product_of_a_prompt_is_right(name):
    torch.manual_seed(0)
    sizes, form = CASES[name]
    check(*sizes, **form)


def test_a_token_has_the_same_bits_in_any_company():
    torch.manual_seed(0)
    x, weight = random_bf16(200, 320), random_bf16(64, 320)
    alone = linear_ops.multiply_prompt(x[150:151], weight, None, False)
    assert torch.equal(alone[0], linear_ops.multiply_prompt(x, weight, None, False)[150])


ROWS = {
    "apart": lambda: random_bf16(20, 160)[:, :64],
    "that begin anywhere": lambda: random_bf16(20, 67)[:, 2:66],
    "behind an odd beginning": lambda: random_bf16(20 * 64 + 3)[3:].view(20, 64),
    "in columns": lambda: random_bf16(64, 20).t(),
}


@pytest.mark.parametrize("name", ROWS)
def test_tokens_may_lie_in_rows(name):
    """Those that no copy of boxes can begin at are brought into order first."""
    torch.manual_seed(0)
    x, weight = ROWS[name](), random_bf16(64, 64)
    found = linear_ops.multiply_prompt(x, weight, None, False)
    ordered = torch.empty(20, 64, dtype=torch.bfloat16).copy_(x)
    assert torch.equal(found, linear_ops.multiply_prompt(ordered, weight, None, False))


def test_ops_are_declared_truthfully():
    tests, ops = ("test_schema", "test_faketensor"), torch.ops.ostinato
    x, weight, bias, rows = random_bf16(5, 64), random_bf16(64, 64), None, random_bf16(5, 64)
    for gated in (False, True):
        torch.library.opcheck(ops.multiply_prompt.default, (x, weight, bias, gated), test_utils=tests)
    torch.library.opcheck(ops.add_product.default, (x, weight, bias, rows), test_utils=tests)


def test_torch_compile_sees_whole_ops():
    """A gate, and a sum in the place of rows, as a layer has them."""
    torch.manual_seed(0)
    x, first, second = random_bf16(5, 64), random_bf16(128, 64, scale=0.1), random_bf16(64, 64, scale=0.1)

    def layer(rows):
        inner = linear_ops.multiply_prompt(x, first, None, True)
        linear_ops.add_product(inner, second, None, rows)
        return rows * 2

    before = random_bf16(5, 64)
    eager, compiled = before.clone(), before.clone()
    doubled = layer(eager)
    assert torch.equal(torch.compile(layer, fullgraph=True, backend="aot_eager")(compiled), doubled)
    assert torch.equal(compiled, eager)
    assert not torch.equal(eager, before)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_random_products_of_prompts():
    chance = random.Random(0)
    for number in count():
        gated = chance.random() < 0.4
        added = not gated and chance.random() < 0.5
        sizes = chance.randint(1, 700), 8 * chance.randint(1, 70), 8 * chance.randint(1, 60)
        check(*sizes, gated=gated, added=added, bias=chance.random() < 0.5)
        if number == 24:
            return
