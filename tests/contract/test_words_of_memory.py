"""Nothing that counts about dictionaries, objects and tensors changes without a word of memory that is read,
whatever happens to them in whatever order."""

import gc
from collections import OrderedDict
from contextlib import suppress
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ostinato.graphs.memory import byte_range, storage_address
from ostinato.graphs.wrapping.words import Words

KEYS = st.integers(0, 3).map(lambda number: f"key{number}")
VALUES = st.integers(0, 3)


def _store(holder, key, value):
    holder.__dict__[key] = value


def _exec(holder, key, value):
    exec(f"{key} = {value}", holder.__dict__)


def _specialised(holder, key, value):
    for _ in range(20):  # until the interpreter has a faster way for this very attribute
        holder.key0 = value
    del key


CHANGES = {
    "attribute": setattr,
    "specialised attribute": _specialised,
    "entry": _store,
    "exec": _exec,
    "delete": lambda holder, key, value: holder.__dict__.pop(key, None),
    "delattr": lambda holder, key, value: hasattr(holder, key) and delattr(holder, key),
    "clear": lambda holder, key, value: holder.__dict__.clear(),
    "update": lambda holder, key, value: holder.__dict__.update({key: value}),
    "or": lambda holder, key, value: holder.__dict__.__ior__({key: value}),
    "setdefault": lambda holder, key, value: holder.__dict__.setdefault(key, value),
    "popitem": lambda holder, key, value: holder.__dict__ and holder.__dict__.popitem(),
    "again": lambda holder, key, value: holder.__dict__.__init__({key: value}),
    "swap": lambda holder, key, value: holder.__dict__.update(dict(reversed(holder.__dict__.items()))),
    "collect": lambda holder, key, value: gc.collect(0),
}


READING = ("values", "cast")


class Plain:
    pass


class Other(Plain):
    pass


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(sorted(CHANGES)), KEYS, VALUES), max_size=12), st.booleans())
def test_no_dictionary_changes_behind_its_word(changes, is_namespace):
    holder = SimpleNamespace(key0=0, key1=1) if is_namespace else Plain()
    holder.key0 = 0
    table = OrderedDict(key0=0)
    words = Words([vars(holder), table], [holder])
    for name, key, value in changes:
        before = list(vars(holder).items())
        CHANGES[name](holder, key, value)
        now = list(vars(holder).items())
        if [(k, id(v)) for k, v in before] != [(k, id(v)) for k, v in now]:
            assert not words.are_same()
            assert 0 in words.changed()
        words.changed()
        words.accept()
        assert words.are_same()
    table.move_to_end("key0")
    table["key1"] = 1
    assert 1 in words.changed()


def test_another_class_shows_and_what_nobody_has_looked_into_is_not_accepted():
    holder, table = Plain(), {"a": 1}
    words = Words([table], [holder])
    holder.__class__ = Other
    assert words.changed() == [1]
    table["a"] = 2  # after somebody asked
    words.accept()
    assert words.changed() == [0]


def _geometry(tensor):
    shape = tensor.data_ptr(), tuple(tensor.size()), tensor.stride(), tensor.storage_offset()
    return *shape, tensor.dtype, tensor.is_conj(), tensor.is_neg()


def _has_its_bytes(tensor):
    if tensor.data_ptr() == 0:
        return tensor.numel() == 0
    return byte_range(tensor)[1] - storage_address(tensor) <= tensor.untyped_storage().nbytes()


def _like(tensor, seed):
    return torch.empty_like(tensor) if seed % 2 else torch.zeros(3 + seed, device=tensor.device)


TENSOR_CHANGES = {
    "nothing": lambda t, seed: None,
    "values": lambda t, seed: t.add_(1),
    "data": lambda t, seed: setattr(t, "data", _like(t, seed)),
    "cast": lambda t, seed: setattr(
        t, "data", t.data.to((torch.float64, torch.int32, torch.complex64)[seed % 3])
    ),
    "reread": lambda t, seed: (
        setattr(t, "data", t.data.view((torch.int32, torch.float32)[seed % 2])) if t.itemsize == 4 else None
    ),
    "conjugate": lambda t, seed: setattr(t, "data", t.data.conj()),
    "negate": lambda t, seed: setattr(t, "data", torch._neg_view(t.data)),
    "transpose": lambda t, seed: t.t_() if t.dim() == 2 else None,
    "unsqueeze": lambda t, seed: t.unsqueeze_(0) if t.dim() < 7 else None,
    "squeeze": lambda t, seed: t.squeeze_(),
    "restride": lambda t, seed: t.as_strided_((2,) * (seed % 7), (1,) * (seed % 7), seed % 2),
    "set": lambda t, seed: t.set_(t.untyped_storage(), seed % 2, (2,), (1,)),
    "other storage": lambda t, seed: t.set_(
        torch.zeros(64, dtype=t.dtype, device=t.device).untyped_storage()
    ),
    "grow": lambda t, seed: t.untyped_storage().resize_(4096 + 64 * seed),
    "shrink": lambda t, seed: t.untyped_storage().resize_(0) if seed == 5 else None,
    "swap": lambda t, seed: torch.utils.swap_tensors(t, _like(t, seed)),
    "resize": lambda t, seed: t.resize_(2, 1 + seed),
}


@settings(max_examples=120, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from(sorted(TENSOR_CHANGES)), st.integers(0, 5)), max_size=6),
    st.integers(0, 6),
)
def test_no_tensor_changes_behind_its_words(device, changes, rank):
    tensor = torch.zeros((2,) * rank, device=device).detach()
    words, then = Words([], [], [tensor]), _geometry(tensor)
    if rank <= 5:
        assert not words.unread  # else nothing is tested here
    for name, seed in changes:
        if name in READING and not _has_its_bytes(tensor):
            continue  # what torch would not notice
        with suppress(RuntimeError):  # torch refuses some of these on some tensors
            TENSOR_CHANGES[name](tensor, seed)
        torch.zeros(3)  # something else in the place of what may be gone
        if _geometry(tensor) != then:
            assert not words.are_same() or words.unread == [tensor]
            words, then = Words([], [], [tensor]), _geometry(tensor)


def test_what_is_read_does_not_keep_memory_nor_hinder_anybody(device):
    """A replaced weight's memory goes at once, and weights can be swapped."""
    parameter = torch.nn.Parameter(torch.zeros(8, 8, device=device))
    words = Words([], [], [parameter])
    held = parameter.untyped_storage()._weak_ref()
    parameter.data = torch.ones(8, 8, device=device)
    assert torch.UntypedStorage._expired(held)
    assert words.have_tensors_changed()
    torch.UntypedStorage._free_weak_ref(held)
    swapped = torch.nn.Parameter(torch.ones(8, 8, device=device))
    words = Words([], [], [parameter])
    torch.utils.swap_tensors(parameter, swapped)
    assert words.have_tensors_changed()
    assert not words.are_same()


@pytest.mark.parametrize("kind", ["array", "slice", "subclass", "sparse", "meta"])
def test_tensors_of_every_kind_are_read_rightly_or_asked(device, kind):
    class Own(torch.Tensor):
        pass

    tensor = {
        "array": lambda: torch.from_numpy(np.zeros(8, np.float32)),
        "slice": lambda: torch.zeros(8, 8, device=device)[2:, 1:5],
        "subclass": lambda: torch.zeros(3, device=device).as_subclass(Own),
        "sparse": lambda: torch.zeros(3, device=device).to_sparse(),
        "meta": lambda: torch.zeros(3, device="meta"),
    }[kind]()
    words = Words([], [], [tensor])
    assert bool(words.unread) == (kind in ("subclass", "sparse", "meta"))
    assert words.are_same()
