"""Kernels with adapters on the GPU, at the shapes of Llama-3.1-8B and at smaller ones, against float64."""

from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from kernels.lora_checks import random_slots, random_stack, wanted_delta
from ostinato.kernels.linear import few_tokens, products, scaled_rows, triton_skinny
from ostinato.kernels.linear.tiles import FUSED, WideTile
from ostinato.kernels.linear.weight import Weight, tile_for
from ostinato.kernels.lora import Adapted, Rows, Stack
from ostinato.kernels.norms.rows import add_rms_norm, rms_norm

SMALL, TOKENS = 1024, (1, 2, 8, 9, 16, 17, 32, 48, 64, 65, 128, 200, 600)
LAYERS = {
    "qkv": ((4096, 1024, 1024), 4096, False),
    "o": ((4096,), 4096, False),
    "gate, up": ((14336, 14336), 4096, True),
    "down": ((4096,), 14336, False),
    "small": ((2048, 1024, 1024), SMALL, False),
    "small, gated": ((3072, 3072), SMALL, True),
}


class Layer(NamedTuple):
    """A linear layer between norms, and a batch of tokens."""

    x: Tensor
    weight: Tensor
    norm_weight: Tensor
    rows: Tensor
    is_gated: bool

    @classmethod
    def random(cls, num_tokens: int, parts: tuple[int, ...], in_features: int, is_gated: bool) -> "Layer":
        def random(*shape: int) -> Tensor:
            return torch.randn(shape, device="cuda").bfloat16()

        weight = random(sum(parts), in_features) * in_features**-0.5
        return cls(
            random(num_tokens, in_features),
            weight,
            random(in_features),
            random(num_tokens, sum(parts)),
            is_gated,
        )

    def run(self, adapted: Adapted | None) -> tuple[Tensor, bool]:
        """By the kernel that is the choice; and whether it did the norm as well."""
        weight = Weight(self.weight)
        tile = tile_for(self.x, weight, gated=self.is_gated)
        if isinstance(tile, FUSED):
            norm = {"norm_weight": self.norm_weight, "eps": 1e-5}
            y = few_tokens.project(self.x, weight, gated=self.is_gated, adapted=adapted, **norm)
            return y, True
        if isinstance(tile, WideTile):
            scaled = scaled_rows.scale(self.x, self.norm_weight)
            return scaled_rows.project(scaled, weight, None, 1e-5, gated=self.is_gated, adapted=adapted), True
        if self.is_gated:
            return products.gated_linear(self.x, weight, adapted=adapted), False
        return products.joined(products.linear_in_parts(self.x, weight, None, adapted), self.x.dtype), False

    def wanted(self, stack: Stack, slots: Tensor, *, is_normed: bool) -> Tensor:
        """In float64."""
        x = self.x.double()
        scaled = (self.x.float() * self.norm_weight.float()).bfloat16() if is_normed else self.x
        factor = (x.square().mean(1, keepdim=True) + 1e-5).rsqrt() if is_normed else 1.0
        y = (scaled.double() @ self.weight.double().T + wanted_delta(scaled, stack, slots)) * factor
        if self.is_gated:
            first, second = y.chunk(2, dim=-1)
            y = torch.nn.functional.silu(first) * second
        return y


@pytest.fixture(params=["columns", "one after the other"])
def slots_of_gated_products(request, monkeypatch):
    if request.param != "columns":
        monkeypatch.setattr(triton_skinny, "MOST_SLOTS_AS_COLUMNS", 0)


@pytest.mark.usefixtures("slots_of_gated_products")
@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("max_rank", [16, 40])
def test_every_number_of_tokens(device, name, max_rank):
    """Right; without an adapter the bits of a step without; a broken one harms its own tokens alone."""
    parts, in_features, is_gated = LAYERS[name]
    torch.manual_seed(0)
    stack = random_stack(device, torch.bfloat16, in_features, parts, max_rank=max_rank)
    for num_tokens in TOKENS if in_features == SMALL else (1, 8, 16, 32, 64, 128, 300):
        layer = Layer.random(num_tokens, parts, in_features, is_gated)
        slots = random_slots(device, num_tokens, stack.num_slots)
        slots[-1] = 2
        found, is_normed = layer.run(Adapted(stack, Rows.of(slots, stack.num_slots)))
        wanted = layer.wanted(stack, slots, is_normed=is_normed)
        assert (found.double() - wanted).norm() < 8e-3 * wanted.norm(), num_tokens
        worst = (found.double() - wanted).norm(dim=1) / wanted.norm(dim=1)
        assert worst.max() < 2e-2, (num_tokens, slots[worst.argmax()])
        without, _ = layer.run(None)
        assert torch.equal(found[slots < 0], without[slots < 0]), num_tokens
        assert not torch.equal(found[-1], without[-1])
        kept = stack.b[0].clone()
        stack.b[0] = float("inf")
        again, _ = layer.run(Adapted(stack, Rows.of(slots, stack.num_slots)))
        stack.b[0] = kept
        assert torch.equal(again[slots != 0], found[slots != 0]), num_tokens


@pytest.mark.parametrize("num_slots", [16, 64])
@pytest.mark.parametrize("num_tokens", [1, 32, 64, 128])
def test_many_slots_and_more_than_tokens(device, num_tokens, num_slots):
    parts, in_features, is_gated = LAYERS["small, gated"]
    torch.manual_seed(0)
    stack = random_stack(device, torch.bfloat16, in_features, parts, num_slots=num_slots)
    layer = Layer.random(num_tokens, parts, in_features, is_gated)
    slots = (torch.arange(num_tokens, device=device, dtype=torch.int32) * 7) % num_slots
    found, is_normed = layer.run(Adapted(stack, Rows.of(slots, num_slots)))
    wanted = layer.wanted(stack, slots, is_normed=is_normed)
    assert (found.double() - wanted).norm() < 8e-3 * wanted.norm()


@pytest.mark.parametrize("num_tokens", [1, 8, 32, 128, 600])
def test_a_replay_follows_the_slots(device, num_tokens):
    """A graph of several layers in a row, with the branches that it may have, again and again."""
    parts, in_features, is_gated = LAYERS["small"]
    torch.manual_seed(0)
    stack = random_stack(device, torch.bfloat16, in_features, parts)
    layers = [Layer.random(num_tokens, parts, in_features, is_gated) for _ in range(4)]
    slots = random_slots(device, num_tokens, 5)

    def run() -> list[Tensor]:
        adapted = Adapted(stack, Rows.of(slots, 5))
        return [layer.run(adapted)[0] for layer in layers]

    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = run()
    for _ in range(5):
        slots.copy_(random_slots(device, num_tokens, 5))
        for layer in layers:
            layer.x.copy_(torch.randn_like(layer.x))
        wanted = [y.clone() for y in run()]
        for result in results:
            result.fill_(float("nan"))
        graph.replay()
        assert all(map(torch.equal, results, wanted))


@pytest.mark.parametrize("num_tokens", [17, 128, 200, 300])
def test_a_norm_adds_what_ran_beside_a_product(device, num_tokens):
    """As plain sums do; rows without an adapter have the bits of a norm without. From a graph, too."""
    parts, in_features, _ = LAYERS["down"]
    torch.manual_seed(0)
    stack = random_stack(device, torch.bfloat16, in_features, parts)
    layer, slots = Layer.random(num_tokens, parts, in_features, False), random_slots(device, num_tokens, 5)
    scale, weight, residual = torch.randn_like(layer.rows[0]), Weight(layer.weight), layer.rows.clone()

    def run(adapted: Adapted | None) -> tuple[Tensor, Tensor]:
        layer.rows.copy_(residual)
        product, deltas = products.linear_beside_adapters(layer.x, weight, None, adapted)
        assert (deltas is None) == (adapted is None or num_tokens > 256)
        return add_rms_norm(product, layer.rows, scale, 1e-5, deltas)

    without = [tensor.clone() for tensor in run(None)]
    found = [tensor.clone() for tensor in run(Adapted(stack, Rows.of(slots, 5)))]
    wanted = layer.wanted(stack, slots, is_normed=False) + residual.double()
    assert (found[1].double() - wanted).norm() < 8e-3 * wanted.norm()
    assert all(torch.equal(new[slots < 0], old[slots < 0]) for new, old in zip(found, without, strict=True))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        again = run(Adapted(stack, Rows.of(slots, 5)))
    for _ in range(3):
        graph.replay()
        assert all(map(torch.equal, again, found))


@pytest.mark.parametrize("num_tokens", [17, 32, 64, 100, 128])
@pytest.mark.parametrize("name", ["small", "small, gated"])
def test_layers_in_a_row_read_complete_tokens(device, num_tokens, name):
    """Each layer reads what the one before it wrote: from a graph, the bits of kernels one at a time."""
    parts, in_features, is_gated = LAYERS[name]
    torch.manual_seed(0)
    stacks = [random_stack(device, torch.bfloat16, in_features, parts) for _ in range(12)]
    layers = [Layer.random(num_tokens, parts, in_features, is_gated) for _ in stacks]
    first, slots = layers[0].x.clone(), random_slots(device, num_tokens, 5)

    def run(after_each: Callable[[], object]) -> list[Tensor]:
        rows, x, results = Rows.of(slots, 5), first, []
        for layer, stack in zip(layers, stacks, strict=True):
            layer = layer._replace(x=x)
            y, _ = layer.run(Adapted(stack, rows))
            results.append(y)
            x = rms_norm(y[:, :in_features].contiguous(), layer.norm_weight, 1e-5)
            after_each()
        return results

    wanted = run(torch.cuda.synchronize)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = run(lambda: None)
    for _ in range(30):
        first.copy_(torch.randn_like(first))
        wanted = run(torch.cuda.synchronize)
        graph.replay()
        assert all(map(torch.equal, found, wanted))
