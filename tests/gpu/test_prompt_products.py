"""`prompt_product.cu` against float64 and against the path without it; in whole steps, in graphs."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional

pytest.importorskip("triton")

from gpu.linear_layer_checks import random
from ostinato.kernels.cuda import compiled
from ostinato.kernels.linear import choice, products
from ostinato.kernels.linear.cuda_prompt import launch_prompt
from ostinato.kernels.linear.tables import Choice, KernelTable
from ostinato.kernels.linear.tiles import Library, MatrixShape, PromptTile
from ostinato.kernels.linear.weight import Weight
from ostinato.kernels.norms.rows import silu_mul

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or not compiled.has_warpgroup_products(torch.device("cuda", 0)),
    reason="needs Hopper and NVRTC",
)

SIZES = [(1, 64, 64), (127, 256, 136), (1111, 1040, 1032), (3000, 6144, 1024), (4096, 1024, 14336)]


def assert_close(out: Tensor, exact: Tensor, most: float = 1.0) -> None:
    """To half of the last bit of a result, and what float32 sums are off beside."""
    error = (out.double() - exact).abs()
    assert (error <= most * (exact.abs() * 2**-8 + 2e-5 * exact.abs().max())).all(), error.max()


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("bias", [False, True])
def test_a_product_matches_float64(sizes, bias):
    torch.manual_seed(0)
    num_tokens, width, columns = sizes
    x, weight = random(num_tokens, columns), random(width, columns, scale=columns**-0.5)
    shift = random(width) if bias else None
    exact = functional.linear(x.double(), weight.double(), None if shift is None else shift.double())
    room = torch.full((num_tokens + 1, width), 7.0, device="cuda", dtype=torch.bfloat16)
    launch_prompt(x, weight, shift, room[:num_tokens])
    assert_close(room[:num_tokens], exact)
    assert (room[num_tokens] == 7.0).all(), "wrote behind the last token"
    rows = random(num_tokens, width)
    total = rows.clone()
    launch_prompt(x, weight, shift, total, added=True)
    assert torch.equal(total, rows + room[:num_tokens]), "rounded, then added, then rounded"


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("bias", [False, True])
def test_a_gate_has_the_bits_of_a_pass_of_its_own(sizes, bias):
    torch.manual_seed(0)
    num_tokens, width, columns = sizes
    x, weight = random(num_tokens, columns), random(2 * width, columns, scale=2 * columns**-0.5)
    shift = random(2 * width) if bias else None
    both, half = (x.new_empty(num_tokens, number * width) for number in (2, 1))
    launch_prompt(x, weight, shift, both)
    launch_prompt(x, weight, shift, half)
    assert torch.equal(half, silu_mul(both))


def test_a_token_has_the_same_bits_in_any_company():
    torch.manual_seed(0)
    x, weight = random(2049, 1024), random(512, 1024)
    full, part = x.new_empty(2049, 512), x.new_empty(300, 512)
    launch_prompt(x, weight, None, full)
    launch_prompt(x[1000:1300], weight, None, part)
    assert torch.equal(part, full[1000:1300])


def test_tokens_may_lie_in_rows_of_any_beginning():
    torch.manual_seed(0)
    room, weight = random(4096, 1032), random(512, 1024)
    apart, anywhere = room[:, :1024], room[:, 3:1027]
    for x in (apart, anywhere, random(1024, 4096).t()):
        found, wanted = x.new_empty(4096, 512), x.new_empty(4096, 512)
        launch_prompt(x, weight, None, found)
        launch_prompt(x.contiguous(), weight, None, wanted)
        assert torch.equal(found, wanted)


def test_gates_of_all_values_are_those_of_a_pass():
    """Every finite bfloat16."""
    every = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).cuda()
    gates = every.view(256, 256)
    ups = random(256, 256)
    x = torch.eye(256, device="cuda", dtype=torch.bfloat16)
    finite = torch.where(gates.isfinite(), gates, 0)
    weight = torch.cat([finite.t(), ups.t()]).contiguous()
    half = x.new_empty(256, 256)
    launch_prompt(x, weight, None, half)
    assert torch.equal(half, silu_mul(torch.cat([finite, ups], dim=1)))


def test_chains_in_a_graph_see_new_weights():
    """A product reads results of the last one; replays read weights that were written in place."""
    torch.manual_seed(0)
    first, second = random(2048, 512, scale=0.05), random(512, 1024, scale=0.05)
    x, rows = random(1500, 512), random(1500, 512)
    inner, total = x.new_empty(1500, 1024), rows.clone()

    def run() -> None:
        total.copy_(rows)
        for _ in range(3):
            launch_prompt(total, first, None, inner)
            launch_prompt(inner, second, None, total, added=True)

    run()
    eager = total.clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    for _ in range(20):
        graph.replay()
    assert torch.equal(total, eager)
    second.neg_()
    graph.replay()
    changed = total.clone()
    run()
    assert torch.equal(changed, total)
    assert not torch.equal(changed, eager)


def test_by_rule_a_layer_has_the_bits_of_cublas_and_passes():
    torch.manual_seed(0)
    x, rows = random(4096, 1024), random(4096, 1024)
    gates, down = Weight(random(6144, 1024, scale=0.03)), Weight(random(1024, 3072, scale=0.02))
    with choice.using(None, package=False):
        assert products.adds_in_place(random(4096, 3072), down, None)
        inner, total = products.gated_linear(x, gates), rows.clone()
        products.add_linear(total, inner, down, None)
    wanted = silu_mul(functional.linear(x, gates.tensor))
    assert torch.equal(inner, wanted)
    assert torch.equal(total, rows + functional.linear(wanted, down.tensor))


def test_the_choice_of_a_table_runs_in_all_its_places():
    torch.manual_seed(0)
    shapes = MatrixShape(512, 256), MatrixShape(256, 256, gated=True)
    x, weight, rows = random(600, 256), Weight(random(512, 256, scale=0.06)), random(600, 512)
    results = {}
    for tile in (PromptTile(), Library()):
        table = KernelTable("sm90-132", {shape: (Choice(500, 700, tile),) for shape in shapes})
        with choice.using(table):
            assert products.adds_in_place(x, weight, None) is isinstance(tile, PromptTile)
            results[tile] = products.linear(x, weight), products.gated_linear(x, weight)
            if tile == PromptTile():
                total = rows.clone()
                products.add_linear(total, x, weight, None)
                assert torch.equal(total, rows + results[tile][0])
            assert products.float_linear(x, weight).dtype == torch.float32
    for ours, other in zip(*results.values(), strict=True):
        torch.testing.assert_close(ours, other, rtol=0.02, atol=0.02)
