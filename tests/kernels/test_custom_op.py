"""An op is its Python function, called directly where nobody watches and seen by everyone who does."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from ostinato.kernels.custom_op import custom_op


@custom_op("shifted_for_tests", mutates_args=("count",))
def shifted(
    x: Tensor,
    count: Tensor,
    by: float = 1.0,
    weight: Tensor | None = None,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """x + by, times weight."""
    count.add_(1)
    return ((x + by) * (1 if weight is None else weight)).to(dtype)


@shifted.register_fake
def _(x: Tensor, *_others: object) -> Tensor:
    return torch.empty_like(x)


X, COUNT = torch.tensor([1.0, 2.0]), torch.zeros(1)


class Seen(TorchDispatchMode):
    """The ops that were dispatched."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.ops.append(str(func))
        return func(*args, **(kwargs or {}))


class SeenCalls(TorchFunctionMode):
    """The functions of torch that were called."""

    def __init__(self) -> None:
        super().__init__()
        self.functions: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.functions.append(str(func))
        return func(*args, **(kwargs or {}))


class Labelled(Tensor):
    """A tensor with a dispatch of its own."""

    seen: list[str] = []

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls.seen.append(str(func))
        return super().__torch_function__(func, types, args, kwargs)


@pytest.fixture
def undispatched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shifted, "_dispatched", lambda *_, **__: pytest.fail("dispatched"))


@pytest.mark.usefixtures("undispatched")
def test_it_is_called_directly_where_nobody_watches() -> None:
    before = COUNT.item()
    assert shifted(X, COUNT).tolist() == [2, 3]
    assert shifted(X, COUNT, 2.0, torch.nn.Parameter(X)).tolist() == [3, 8]
    assert shifted(X, COUNT, by=3.0, weight=None, dtype=torch.int64).tolist() == [4, 5]
    assert COUNT.item() == before + 3


def test_a_mode_sees_the_op_and_not_what_it_is_made_of() -> None:
    with Seen() as seen:
        assert shifted(X, COUNT).tolist() == [2, 3]
    assert seen.ops[0] == "ostinato.shifted_for_tests.default"
    assert not any("add" in op for op in seen.ops)


def test_both_ways_hand_over_the_same() -> None:
    arguments = (X, COUNT, 2.0, torch.nn.Parameter(X), torch.float64)
    with Seen():
        dispatched = shifted(*arguments)
    direct = shifted(*arguments)
    assert torch.equal(dispatched, direct)
    assert dispatched.dtype == direct.dtype == torch.float64


def test_a_function_mode_sees_it() -> None:
    with SeenCalls() as seen:
        shifted(X, COUNT)
    assert any("shifted_for_tests" in function for function in seen.functions)


def test_a_tensor_with_a_dispatch_of_its_own_sees_it_wherever_it_stands() -> None:
    for arguments in ((X.as_subclass(Labelled), COUNT), (X, COUNT, 1.0, X.as_subclass(Labelled))):
        Labelled.seen.clear()
        shifted(*arguments)
        assert any("shifted_for_tests" in function for function in Labelled.seen)


def test_a_tensor_without_data_gets_what_was_registered_for_it() -> None:
    with FakeTensorMode() as mode:
        fake = mode.from_tensor(X)
    before = COUNT.item()
    with pytest.raises(AssertionError):  # a fake tensor and a real one, found out by the fake mode itself
        shifted(fake, COUNT)
    with mode:
        assert shifted(fake, mode.from_tensor(COUNT)).shape == X.shape
    assert COUNT.item() == before


def test_torch_compile_keeps_it_as_one_op() -> None:
    graphs: list[torch.fx.GraphModule] = []

    def keep(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(lambda x: shifted(x * 2, COUNT), backend=keep, fullgraph=True)
    assert compiled(X).tolist() == [3, 5]
    assert "ostinato.shifted_for_tests.default" in [str(node.target) for node in graphs[0].graph.nodes]


def test_a_transform_sees_it() -> None:
    @custom_op("doubled_for_tests")
    def doubled(x: Tensor) -> Tensor:
        return torch.from_numpy(x.numpy() * 2)  # needs the data itself, as a kernel does

    rows = torch.arange(6.0).view(3, 2)
    assert torch.equal(torch.func.vmap(doubled)(rows), rows * 2)
