"""Adapters beside linear layers: the torch reference, slots, and Triton's kernels in its interpreter."""

import pytest
import torch

from kernels import interpreted, lora_checks
from kernels.lora_checks import random_stack
from ostinato.kernels.lora import LowRank, Stack, StackError


@pytest.mark.parametrize("num_tokens", [1, 5, 16, 40])
@pytest.mark.parametrize("parts", [(48,), (32, 8, 8), (24, 24)], ids=str)
def test_the_reference_is_right(num_tokens: int, parts: tuple[int, ...]) -> None:
    lora_checks.check_add("cpu", torch.float32, num_tokens, 64, parts)
    lora_checks.check_add("cpu", torch.float32, num_tokens, 64, parts, max_rank=20)
    lora_checks.check_add("cpu", torch.bfloat16, num_tokens, 64, parts, tolerance=2e-2)


def test_a_slot_that_is_put_again_has_nothing_of_what_was_there() -> None:
    stack = random_stack("cpu", torch.float32, 32, (16, 8))
    a, b = torch.randn(2, 32), torch.randn(8, 2)
    stack.put(0, [None, LowRank(a, b, scaling=2.0)])
    assert stack.ranks[0] == 2
    assert torch.equal(stack.a[0, 16:18], a)
    assert torch.equal(stack.b[0, 16:, :2], b * 2)
    assert stack.a[0].count_nonzero() == a.numel()
    assert stack.b[0].count_nonzero() == b.numel()
    stack.clear(0)
    assert not any(tensor[0].any() for tensor in (stack.a, stack.b, stack.ranks))


@pytest.mark.parametrize(
    ("slot", "parts", "text"),
    [
        (5, [None, None], "slot 5 of 5"),
        (-1, [None, None], "slot -1"),
        (0, [None], "1 parts for a layer of 2"),
        (0, [None, LowRank(torch.ones(17, 32), torch.ones(8, 17))], "rank 17"),
        (0, [LowRank(torch.ones(2, 31), torch.ones(16, 2)), None], r"part 0: .*\[2, 31\].*\[2, 32\]"),
        (0, [None, LowRank(torch.ones(2, 32), torch.ones(8, 3))], r"part 1: .*\[8, 3\].*\[8, 2\]"),
    ],
)
def test_matrices_that_do_not_fit_change_nothing(slot: int, parts: list[LowRank | None], text: str) -> None:
    stack = random_stack("cpu", torch.float32, 32, (16, 8))
    before = [tensor.clone() for tensor in (stack.a, stack.b, stack.ranks)]
    with pytest.raises(StackError, match=text):
        stack.put(slot, parts)
    assert all(map(torch.equal, before, (stack.a, stack.b, stack.ranks)))


def test_an_allocator_is_asked_by_name() -> None:
    asked: dict[str, tuple[int, ...]] = {}

    def allocate(shape: tuple[int, ...], dtype: torch.dtype, name: str) -> torch.Tensor:
        asked[name] = shape
        return torch.full(shape, 3, dtype=dtype)

    stack = Stack.empty(
        2,
        9,
        32,
        (16, 8),
        dtype=torch.float32,
        device=torch.device("cpu"),
        allocate=allocate,
        name="x",
    )
    names = [f"x.lora_{kind}" for kind in ("a", "b", "ranks")]
    assert asked == dict(zip(names, [(2, 32, 32), (2, 24, 16), (2,)], strict=True))
    assert not any(tensor.any() for tensor in (stack.a, stack.b, stack.ranks))
    assert stack.nbytes == sum(tensor.nbytes for tensor in (stack.a, stack.b, stack.ranks))


@pytest.mark.timeout(300)
@pytest.mark.parametrize("which", ["few", pytest.param("all", marks=pytest.mark.slow)])
def test_the_kernels_in_tritons_interpreter(which: str) -> None:
    interpreted.assert_passes("kernels.lora_interpreter_checks", which, seconds=280)
