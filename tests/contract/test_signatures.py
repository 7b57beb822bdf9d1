"""Which calls are alike: constants, objects that cannot be, and tensors that are one and the same."""

import enum
import logging
import math
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from contract.steps import WIDTH, randn, reasons, same, wrap
from ostinato.graphs import ConfigError, graphed


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


def test_without_a_graph_rows_of_arguments_need_not_be_alike(device):
    f = wrap(lambda x, starts: x.sum() + starts.sum().item())
    f(randn(4, device=device), randn(4, device=device))
    assert not f.report().graphs
    x, starts = randn(4, device=device), randn(3, device=device)
    assert torch.allclose(f(x, starts), x.sum() + starts.sum())


def test_bags_between_offsets_get_no_graph(device):
    """Offsets of padding do not lie behind those of real rows, and such bags end the process on CUDA."""
    bag = torch.nn.EmbeddingBag(30, 8, mode="mean", device=device)
    f = wrap(lambda ids, offsets: bag(ids, offsets), [4, 8])
    with torch.no_grad():
        for starts in (list(range(8)), [0, 2, 3]):
            ids, offsets = torch.arange(8, device=device), torch.tensor(starts, device=device)
            assert same(f(ids, offsets), bag(ids, offsets))
    assert not f.report().graphs
    assert "offsets" in str(f.report().failures)


def test_a_dictionary_in_another_order_is_told_apart_and_named(device, caplog):
    f = graphed(lambda batch: torch.cat(list(batch.values()), 1), ladder=[2, 4])
    x, y = randn(2, WIDTH, device=device), randn(2, WIDTH, device=device, seed=1)
    assert same(f({"x": x, "y": y}), torch.cat([x, y], 1))
    with caplog.at_level("WARNING", "ostinato.graphs"):
        assert same(f({"y": y, "x": x}), torch.cat([y, x], 1))
    assert "order" in caplog.text
    assert "batch_y" in caplog.text


@pytest.mark.parametrize(("option", "told"), [("threads", "turns"), ("laders", "ladder"), ("stream", "pool")])
def test_an_option_that_does_not_exist_is_refused_by_name(option, told):
    with pytest.raises(ConfigError, match=f"{option}.*{told}"):
        graphed(lambda x: x, ladder=[2], **{option: 2})
