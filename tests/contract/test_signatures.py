"""Which calls are alike: constants, objects that cannot be, and tensors that are one and the same."""

import enum
import logging
import math
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from contract.steps import WIDTH, close, randn, reasons, same, wrap
from ostinato.graphs import BatchError


class Colour(enum.Enum):
    RED = 1
    BLUE = 2


class Level(enum.IntEnum):
    ONE = 1


@dataclass(frozen=True)
class Config:
    scale: float = 2.0
    name: str = "plain"


def twice(x):
    return x * 2


def thrice(x):
    return x * 3


# -- constants -----------------------------------------------------------------------------------------


def test_the_order_of_keywords_does_not_matter(device):
    f = wrap(lambda x, *, scale, shift, flag=False: x * scale + shift)
    x, shift = randn(3, WIDTH, device=device), randn(3, WIDTH, device=device, seed=1)
    for _ in range(2):
        assert same(f(x, scale=2.0, shift=shift, flag=True), x * 2 + shift)
        assert same(f(x, flag=True, shift=shift, scale=2.0), x * 2 + shift)
    assert (reasons(f), f.report().replays) == ({}, 4)


def test_zero_and_minus_zero_are_two_constants(device):
    f = wrap(lambda x, zero: x.abs() / x.new_full(x.shape, zero))
    x = randn(2, WIDTH, device=device)
    assert same(f(x, 0.0), torch.full_like(x, math.inf))
    assert same(f(x, -0.0), torch.full_like(x, -math.inf))
    assert same(f(x, 0.0), torch.full_like(x, math.inf))
    assert (reasons(f), f.report().replays) == ({"unseen-signature": 1}, 2)


def test_the_parts_of_a_complex_constant_have_signs_too(device):
    f = wrap(lambda x, z: x.abs() / x.new_full(x.shape, z.imag))
    x = randn(2, WIDTH, device=device)
    assert same(f(x, complex(1, 0.0)), torch.full_like(x, math.inf))
    assert same(f(x, complex(1, -0.0)), torch.full_like(x, -math.inf))


def test_not_a_number_is_equal_to_itself(device):
    f = wrap(lambda x, fill: torch.where(x > 0, x, fill))
    x = randn(3, WIDTH, device=device)
    for _ in range(3):
        fill = float("nan")
        assert same(f(x, fill), torch.where(x > 0, x, fill))
    assert (reasons(f), f.report().replays) == ({}, 3)


@pytest.mark.parametrize(
    ("first", "second"),
    [(1, True), (True, 1), (1, 1.0), (0, False), (1.0, True), (1.0, 1 + 0j), ("1", b"1"), (Level.ONE, 1)],
)
def test_equal_values_of_other_types_are_other_constants(device, first, second):
    def step(x, value):
        return x * {int: 2, bool: 3, float: 4, complex: 5, str: 6, bytes: 7, Level: 8}[type(value)]

    f = wrap(step)
    x = randn(3, WIDTH, device=device)
    for value in (first, second, first):
        assert same(f(x, value), step(x, value))
    assert (reasons(f), f.report().replays) == ({"unseen-signature": 1}, 2)


CONSTANTS = {
    "none": (lambda: None, lambda: 1),
    "bool": (lambda: True, lambda: False),
    "int": (lambda: 10**20 // 7, lambda: 3),
    "float": (lambda: 2.5 * 3, lambda: 1.0),
    "complex": (lambda: complex(1, 2), lambda: complex(2, 1)),
    "str": (lambda: "".join(["a", "b"]), lambda: "c"),
    "bytes": (lambda: bytes([1, 2]), lambda: b"c"),
    "numpy integer": (lambda: np.int64(3), lambda: np.int64(4)),
    "numpy float": (lambda: np.float32("nan"), lambda: np.float32(-0.0)),
    "enum": (lambda: Colour.RED, lambda: Colour.BLUE),
    "dtype": (lambda: torch.float16, lambda: torch.float32),
    "device": (lambda: torch.device("cpu"), lambda: torch.device("meta")),
    "size": (lambda: torch.Size([2, 3]), lambda: torch.Size([3, 2])),
    "slice": (lambda: slice(0, 2), lambda: slice(0, 3)),
    "function": (lambda: twice, lambda: thrice),
    "class": (lambda: Colour, lambda: Level),
    "dataclass type": (lambda: Config, lambda: Level),
    "dataclass": (lambda: Config(3.0), lambda: Config(4.0)),
    "list": (lambda: [1, "a", None], lambda: [1, "a"]),
}


@pytest.mark.parametrize("kind", CONSTANTS)
def test_equal_constants_are_served_and_others_run_eagerly(device, kind):
    make, other = CONSTANTS[kind]
    f = wrap(lambda x, value, *, more: x * 2)
    x = randn(3, WIDTH, device=device)
    for _ in range(2):
        assert same(f(x, make(), more={"deep": make()}), x * 2)
    assert (reasons(f), f.report().replays) == ({}, 2)
    f(x, other(), more={"deep": make()})
    f(x, make(), more={"deep": other()})
    assert (reasons(f), f.report().replays) == ({"unseen-signature": 2}, 2)


def test_a_function_or_slice_as_an_argument_acts_as_itself(device):
    f = wrap(lambda x, act, part: act(x)[:, part])
    x = randn(3, WIDTH, device=device)
    assert same(f(x, twice, slice(0, 2)), twice(x)[:, :2])
    assert same(f(x, thrice, slice(0, 2)), thrice(x)[:, :2])
    assert same(f(x, twice, slice(1, 3)), twice(x)[:, 1:3])
    assert same(f(x, twice, slice(0, 2)), twice(x)[:, :2])


# -- objects that may change ---------------------------------------------------------------------------


class Settings:
    def __init__(self, scale):
        self.scale = scale


class Agreeing(Settings):
    """Says that it is equal to everything."""

    def __eq__(self, other):
        return True

    __hash__ = None


@pytest.mark.parametrize(
    "make", [Settings, Agreeing, lambda scale: SimpleNamespace(scale=scale), lambda scale: np.array(scale)]
)
def test_an_object_that_may_change_runs_eagerly_with_the_reason(device, make):
    def step(x, *, settings):
        return x * float(getattr(settings, "scale", settings))

    f = wrap(step)
    x = randn(3, WIDTH, device=device)
    settings = make(2.0)
    assert same(f(x, settings=settings), x * 2)
    assert same(f(x, settings=settings), x * 2)
    if isinstance(settings, np.ndarray):
        settings[...] = 3.0
    else:
        settings.scale = 3.0
    assert same(f(x, settings=settings), x * 3)
    assert same(f(x, settings=make(4.0)), x * 4)
    assert reasons(f) == {"opaque-argument": 4}
    assert f.report().graphs == ()


def test_a_call_with_an_opaque_object_beside_captured_ones_runs_eagerly_too(device):
    f = wrap(lambda x, how: x * (how if isinstance(how, float) else how.scale))
    x = randn(3, WIDTH, device=device)
    assert same(f(x, 2.0), x * 2)
    assert same(f(x, Settings(3.0)), x * 3)
    assert same(f(x, 2.0), x * 2)
    assert (reasons(f), f.report().replays) == ({"opaque-argument": 1}, 2)


def test_a_call_after_an_opaque_first_one_is_captured(device):
    f = wrap(lambda x, how: x * (how if isinstance(how, float) else how.scale))
    x = randn(3, WIDTH, device=device)
    assert same(f(x, Settings(3.0)), x * 3)
    for _ in range(2):
        assert same(f(x, 2.0), x * 2)
    assert (reasons(f), f.report().replays) == ({"opaque-argument": 1}, 2)


@pytest.mark.parametrize("nested", [False, True])
def test_one_warning_names_the_argument(device, nested, caplog):
    f = wrap(lambda x, *, first, knobs: x * 2)
    x = randn(3, WIDTH, device=device)
    with caplog.at_level(logging.WARNING, logger="ostinato.graphs"):
        for _ in range(3):
            knobs = {"deep": [Settings(1.0)]} if nested else Settings(1.0)
            assert same(f(x, first=1, knobs=knobs), x * 2)
    [warning] = [record.getMessage() for record in caplog.records if "knobs" in record.getMessage()]
    assert "first" not in warning


# -- the same tensor twice -----------------------------------------------------------------------------


def written(left, right):
    left.add_(1)
    return left + right


def test_one_tensor_for_two_arguments_is_refused_where_one_is_written(device):
    f = wrap(written)
    z = randn(3, WIDTH, device=device)
    given = z.clone()
    for _ in range(2):
        with pytest.raises(BatchError, match=r"left.*right|right.*left"):
            f(z, z)
        assert same(z, given)
    other = randn(3, WIDTH, device=device, seed=1)
    for _ in range(2):
        assert same(f(z, other), given + 1 + other)
        assert same(z, given)
        with pytest.raises(BatchError, match=r"left.*right|right.*left"):
            f(z, z)
    assert (reasons(f), f.report().replays) == ({}, 2)


@pytest.mark.parametrize(
    "views",
    [
        lambda base: (base[:3], base[1:4]),
        lambda base: (base[:3], base[:3].detach()),
        lambda base: (base[:3], base[:3].clone().set_(base[:3])),
    ],
)
def test_views_that_overlap_are_refused_where_one_is_written(device, views):
    f = wrap(written)
    base = randn(6, WIDTH, device=device)
    f(base[:3].clone(), base[3:].clone())
    with pytest.raises(BatchError, match=r"left.*right|right.*left"):
        f(*views(base))
    assert same(base, randn(6, WIDTH, device=device))


def test_views_that_lie_beside_each_other_are_served(device):
    f = wrap(written)
    base = randn(6, WIDTH, device=device)
    for _ in range(2):
        assert same(f(base[:3], base[3:]), base[:3] + 1 + base[3:])
    assert (reasons(f), f.report().replays) == ({}, 2)


def test_one_tensor_for_two_arguments_is_served_where_none_is_written(device):
    f = wrap(lambda left, right: left * 2 + right)
    z = randn(3, WIDTH, device=device)
    for _ in range(2):
        assert same(f(z, z), z * 2 + z)
    assert (reasons(f), f.report().replays) == ({}, 2)


def test_one_tensor_for_two_arguments_is_served_where_a_third_is_written(device):
    def step(left, right, target):
        target.add_(1)
        return left * 2 + right + target

    f = wrap(step)
    z, target = randn(3, WIDTH, device=device), randn(3, WIDTH, device=device, seed=1)
    for _ in range(2):
        assert same(f(z, z, target), z * 2 + z + (target + 1))
    assert (reasons(f), f.report().replays) == ({}, 2)


@pytest.mark.parametrize("first", [3, 7])
def test_eager_calls_of_a_function_that_writes_its_arguments_leave_the_callers_alone(device, first):
    f = wrap(lambda x: x.mul_(2) + 1)
    for n in (first, 3, 7, 3):
        x = randn(n, WIDTH, device=device, seed=n)
        given = x.clone()
        assert same(f(x), given * 2 + 1)
        assert same(x, given), n
    x = randn(3, 2, WIDTH, device=device)
    given = x.clone()
    assert same(f(x), given * 2 + 1)
    assert same(x, given), "an unseen signature"
    assert reasons(f) == {"larger-than-max": 2 if first == 7 else 1, "unseen-signature": 1}


def test_a_function_that_writes_and_cannot_be_captured_leaves_the_callers_tensor_alone(device):
    def step(x):
        x.mul_(2)
        return x + x.sum().item()

    f = wrap(step)
    for n in (3, 2):
        x = randn(n, WIDTH, device=device, seed=n)
        given = x.clone()
        assert close(f(x), given * 2 + (given * 2).sum())
        assert same(x, given)
    assert reasons(f) == {"capture-failed": 2}
