"""An op is its Python function, called directly where nobody watches and seen by everyone who does."""

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from ostinato.kernels.custom_op import custom_op


@custom_op("shifted_for_tests", mutates_args=("count",), result=lambda x: torch.empty_like(x))
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


class Pair(NamedTuple):
    """Operands that belong together."""

    scale: Tensor
    offset: int


@custom_op("scaled_for_tests", result=lambda pair, x: x.new_empty(pair.scale.size(0), x.size(0)))
def scaled(x: Tensor, pair: Pair, times: int = 1) -> Tensor:
    """x times each scale, plus an offset, several times."""
    return (pair.scale[:, None] * x + pair.offset) * times


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


PAIR = Pair(torch.tensor([1.0, 10.0, 100.0]), 1)


def test_the_fields_of_a_named_tuple_are_parameters_of_the_schema() -> None:
    assert str(torch.ops.ostinato.scaled_for_tests.default._schema).endswith(
        "scaled_for_tests(Tensor x, Tensor scale, SymInt offset, SymInt times=1) -> Tensor"
    )
    wanted = [[2, 3], [11, 21], [101, 201]]
    assert scaled(X, PAIR).tolist() == wanted
    assert torch.ops.ostinato.scaled_for_tests(X, *PAIR).tolist() == wanted
    with Seen() as seen:
        assert scaled(X, PAIR, 2).tolist() == [[2 * each for each in row] for row in wanted]
    assert seen.ops[0] == "ostinato.scaled_for_tests.default"


def test_a_tensor_with_a_dispatch_of_its_own_sees_it_inside_a_named_tuple() -> None:
    Labelled.seen.clear()
    scaled(X, Pair(PAIR.scale.as_subclass(Labelled), 1))
    assert any("scaled_for_tests" in function for function in Labelled.seen)


def test_a_named_tuple_of_tensors_without_data_makes_an_empty_result() -> None:
    with FakeTensorMode() as mode:
        assert scaled(mode.from_tensor(X), Pair(mode.from_tensor(PAIR.scale), 1)).shape == (3, 2)


def test_torch_compile_keeps_an_op_of_a_named_tuple() -> None:
    compiled = torch.compile(lambda x: scaled(x * 2, PAIR), backend="eager", fullgraph=True)
    assert compiled(X).tolist() == [[3, 5], [21, 41], [201, 401]]
