"""Ordinary code that a stranger brought, and what became of it: right, or eager with a reason."""

import copy
import functools
import gc
import random
import threading
import time
import weakref
from collections import deque
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from contract.steps import WIDTH, randn, reasons, same, wrap
from ostinato.graphs import AddressError, VerifyError, graphed

LADDER = [1, 2, 4, 8]


def batches(device, sizes=(4, 4, 3, 1, 8, 2)):
    return [randn(n, WIDTH, device=device, seed=seed) for seed, n in enumerate(sizes)]


def agrees(f, plain, x, tolerance=1e-4):
    with torch.no_grad():
        got, wanted = f(x), plain(x)
    return got.shape == wanted.shape and torch.allclose(got, wanted, rtol=tolerance, atol=tolerance)


def pair(module, device, **settings):
    """A wrapped module and its twin."""
    module = module.to(device)
    return wrap(module, LADDER, **settings), copy.deepcopy(module)


# -- state in Python -----------------------------------------------------------------------------------


class KeyValues(nn.Module):
    """A cache with a position that Python counts."""

    def __init__(self):
        super().__init__()
        self.project = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("keys", torch.zeros(8, 64, WIDTH))
        self.position = 0

    def forward(self, x):
        self.keys[: len(x), self.position] = self.project(x)
        self.position += 1
        return self.keys[: len(x), : self.position].mean(1)


class Concatenating(nn.Module):
    """A cache that grows by assignment."""

    def __init__(self):
        super().__init__()
        self.project = nn.Linear(WIDTH, WIDTH)
        self.keys = None

    def forward(self, x):
        new = self.project(x).unsqueeze(1)
        self.keys = new if self.keys is None else torch.cat([self.keys, new], 1)
        return self.keys.mean(1)


class InADictionary(nn.Module):
    """A sum that is kept by assignment."""

    def __init__(self):
        super().__init__()
        self.project = nn.Linear(WIDTH, WIDTH)
        self.cache = {}

    def forward(self, x):
        new, before = self.project(x), self.cache.get("sum")
        self.cache["sum"] = new if before is None else before + new
        return self.cache["sum"] * 1


class Listing(nn.Module):
    """A history."""

    def __init__(self):
        super().__init__()
        self.project = nn.Linear(WIDTH, WIDTH)
        self.history = []

    def forward(self, x):
        self.history.append(self.project(x))
        return sum(self.history)


class ThroughAFactory(nn.Module):
    """A number that Python counts, and that reaches the device without a tensor."""

    def __init__(self, make):
        super().__init__()
        self.make = make
        self.count = 0

    def forward(self, x):
        self.count += 1
        return x + self.make(self.count, x.device)


@pytest.mark.parametrize("kind", [KeyValues, Concatenating, InADictionary, Listing])
def test_state_that_python_keeps_is_right_from_the_first_call_on(device, kind):
    f, plain = pair(kind(), device)
    for x in batches(device, (4, 4, 4, 4)):
        assert agrees(f, plain, x)
    assert f.report().replays == 0
    assert sum(reasons(f).values()) == 4


@pytest.mark.parametrize(
    "make",
    [
        lambda n, device: torch.arange(n, n + 1, device=device),
        lambda n, device: torch.full((WIDTH,), float(n), device=device),
        lambda n, device: torch.linspace(0, n, WIDTH, device=device),
    ],
    ids=["arange", "full", "linspace"],
)
def test_a_count_that_becomes_a_tensor_is_not_burned_in(device, make):
    f, plain = pair(ThroughAFactory(make), device)
    for x in batches(device):
        assert agrees(f, plain, x)


def test_a_count_for_the_log_alone_costs_no_graph_and_is_not_moved_by_trial_runs_that_were_refused(device):
    class Logged(nn.Module):
        calls = 0

        def forward(self, x):
            self.calls += 1
            return x * 2

    module = Logged()
    f = wrap(module, LADDER)
    for x in batches(device):
        assert same(f(x), x * 2)
    assert f.report().replays == 6
    assert reasons(f) == {}


def test_a_draw_of_pythons_own_generator_is_not_repeated_for_ever(device):
    f = wrap(lambda x: x + 1 if random.random() < 0.01 else x, LADDER)
    f(randn(3, WIDTH, device=device))
    assert f.report().graphs == ()
    assert all("random" in cause for cause in f.report().failures.values())


class Aux(nn.Module):
    """Leaves something beside its result, as losses of experts and maps of attention are left."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.aux = None

    def forward(self, x):
        y = self.linear(x)
        self.aux = (y**2).sum(-1)
        return y


def test_what_a_module_leaves_beside_its_result_is_that_of_the_call(device):
    f, plain = pair(Aux(), device)
    for x in batches(device):
        assert agrees(f, plain, x)
        assert f.aux.shape == plain.aux.shape
        assert torch.allclose(f.aux, plain.aux, rtol=1e-4, atol=1e-4)
    assert f.report().replays >= 5


def test_what_a_hook_collects_is_that_of_the_call(device):
    module, found = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()).to(device), {}
    module[0].register_forward_hook(lambda module, args, out: found.update(hidden=out))
    f = wrap(module, LADDER)
    for x in batches(device):
        f(x)
        with torch.no_grad():
            wanted = F.linear(x, module[0].weight, module[0].bias)
        assert torch.allclose(found["hidden"], wanted, atol=1e-5)


@pytest.mark.parametrize("norm", [torch.nn.utils.spectral_norm, torch.nn.utils.weight_norm])
@pytest.mark.filterwarnings("ignore")
def test_weights_that_a_hook_recomputes_are_served(device, norm):
    module = nn.Sequential(norm(nn.Linear(WIDTH, WIDTH)), nn.ReLU()).to(device).eval()
    f = wrap(module, LADDER)
    for x in batches(device):
        assert agrees(f, module, x)
    assert f.report().replays >= 4


# -- changes -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "change",
    [
        lambda weight: setattr(weight, "data", weight.data.t()),
        lambda weight: setattr(weight, "data", weight.data[:4]),
    ],
    ids=["transposed", "cut"],
)
def test_another_geometry_at_the_same_address_is_noticed(device, change):
    module = nn.Linear(WIDTH, WIDTH, bias=False).to(device)
    f, x = wrap(module, LADDER), randn(3, WIDTH, device=device)
    f(x)
    change(module.weight)
    with pytest.raises(AddressError, match="weight"):
        f(x)


def test_hooks_and_patched_methods_are_noticed(device):
    module = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()).to(device)
    f, x = wrap(module, LADDER), randn(3, WIDTH, device=device)
    f(x)
    hook = f.register_forward_hook(lambda module, args, out: out + 1)
    assert agrees(f, module, x)
    hook.remove()
    inner = module[0].register_forward_pre_hook(lambda module, args: (args[0] * 2,))
    assert agrees(f, module, x)
    inner.remove()
    plain = module[0].forward
    module[0].forward = lambda x: plain(x) + 1
    assert agrees(f, module, x)
    assert reasons(f) == {"attribute-changed": 3}
    del module[0].forward
    f(x)
    assert f.report().replays == 2


def test_a_container_of_tensors_that_is_replaced_is_noticed(device):
    held = {"params": {"w": randn(WIDTH, WIDTH, device=device)}}

    def step(x):
        return x @ held["params"]["w"]

    f, x = wrap(step, LADDER), randn(3, WIDTH, device=device)
    f(x)
    held["params"] = {"w": held["params"]["w"] * 2}
    with pytest.raises(AddressError, match="params"):
        f(x)


def test_an_object_that_holds_a_cache_and_is_made_anew_is_noticed(device):
    class Cache:
        def __init__(self):
            self.total = torch.zeros(WIDTH, device=device)

    class Generator:
        def __init__(self):
            self.cache = Cache()

        def step(self, x):
            self.cache.total += 1
            return x + self.cache.total

    generator = Generator()
    f, x = wrap(generator.step, LADDER), randn(3, WIDTH, device=device)
    f(x)
    generator.cache = Cache()
    with pytest.raises(AddressError, match="cache"):
        f(x)


SCALE = None


class Scaled(nn.Module):
    """Uses a tensor of its file."""

    def forward(self, x):
        return x * SCALE


def test_a_tensor_of_the_file_that_a_method_uses_is_watched(device):
    global SCALE
    SCALE = torch.full((), 2.0, device=device)
    f, x = wrap(Scaled(), LADDER), randn(3, WIDTH, device=device)
    f(x)
    SCALE = torch.full((), 5.0, device=device)
    with pytest.raises(AddressError, match="SCALE"):
        f(x)


def test_any_attribute_that_is_another_one_is_noticed(device):
    class Settings(nn.Module):
        def __init__(self):
            super().__init__()
            self.act, self.config, self.dims = F.relu, {"scale": 2.0}, (0, 1)

        def forward(self, x):
            return self.act(x) * self.config["scale"] * (1 + self.dims[0])

    x = randn(3, WIDTH, device=device)
    for name, value in {"act": F.gelu, "config": {"scale": 3.0}, "dims": (1, 0)}.items():
        module = Settings()
        f = graphed(module, ladder=LADDER)
        f(x)
        setattr(module, name, value)
        assert torch.allclose(f(x), module(x)), name
        assert reasons(f) == {"attribute-changed": 1}


def test_what_nobody_reads_may_change(device):
    module = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH)).to(device)
    module.head = None
    f, x = wrap(lambda x: module(x)[:, :4], LADDER), randn(3, WIDTH, device=device)
    f(x)
    module[0].register_parameter("extra", nn.Parameter(torch.zeros(1, device=device)))
    module.last_batch = x
    assert agrees(f, lambda x: module(x)[:, :4], x)
    assert f.report().replays == 2


# -- kinds of modules, functions and calls -------------------------------------------------------------


def test_lazy_modules_are_made_by_the_first_call(device):
    f = wrap(nn.Sequential(nn.LazyLinear(4), nn.ReLU()).to(device), LADDER)
    for x in batches(device):
        assert agrees(f, f.unwrap(), x)
    assert f.report().replays == 5


def test_classes_that_register_their_subclasses_learn_of_none(device):
    class Base(nn.Module):
        known = {}

        def __init_subclass__(cls, *, key, **more):
            super().__init_subclass__(**more)
            Base.known[key] = cls

    class Mine(Base, key="mine"):
        def forward(self, x):
            return x + 1

    f, x = wrap(Mine(), LADDER), randn(3, WIDTH, device=device)
    assert same(f(x), x + 1)
    assert Base.known == {"mine": Mine}


def test_the_class_of_a_wrapper_is_not_changed_behind_the_module(device):
    class Twice(nn.Module):
        def forward(self, weight):
            return weight * 2

    module = nn.Linear(WIDTH, WIDTH).to(device)
    f, x = wrap(module, LADDER), randn(3, WIDTH, device=device)
    with pytest.raises(TypeError, match="unwrap"):
        nn.utils.parametrize.register_parametrization(f, "weight", Twice())
    assert agrees(f, module, x)


def test_an_encoder_with_nested_tensors_inside_runs_eagerly_for_a_reason(device):
    layer = nn.TransformerEncoderLayer(WIDTH, 2, 16, batch_first=True)
    module = nn.TransformerEncoder(layer, 2).to(device).eval()
    f, x = wrap(module, LADDER), randn(3, 5, WIDTH, device=device)
    mask = torch.zeros(3, 5, dtype=torch.bool, device=device)
    mask[0, 3:] = True
    with torch.no_grad():
        wanted = module(x, src_key_padding_mask=mask)
        for _ in range(2):
            assert torch.allclose(f(x, src_key_padding_mask=mask), wanted, atol=1e-5)


def test_a_sparse_result_is_refused_and_right(device):
    f, x = wrap(lambda x: x.relu().to_sparse(), LADDER), randn(3, WIDTH, device=device)
    for _ in range(2):
        assert same(f(x).to_dense(), x.relu())
    assert f.report().graphs == ()


def test_transforms_of_functions_run_the_function(device):
    module = nn.Linear(WIDTH, WIDTH).to(device)
    f, x = wrap(module, LADDER), randn(3, WIDTH, device=device)
    f(x)
    with torch.no_grad():
        assert torch.allclose(torch.func.vmap(f)(x.unsqueeze(1)), module(x).unsqueeze(1), atol=1e-5)
    assert reasons(f) == {"inside-transform": 1}


def test_one_hot_with_its_classes_given_is_captured(device):
    f = wrap(lambda ids: F.one_hot(ids, 5).float() @ torch.ones(5, 2, device=device), LADDER)
    for n in (3, 1, 4):
        ids = torch.arange(n, device=device) % 5
        assert same(f(ids), torch.ones(n, 2, device=device))
    assert f.report().replays == 3


def test_an_empty_batch_runs_eagerly(device):
    f = wrap(nn.Linear(WIDTH, 3).to(device), LADDER)
    empty = randn(0, WIDTH, device=device)
    assert f(empty).shape == (0, 3)
    f(randn(2, WIDTH, device=device))
    assert f(empty).shape == (0, 3)
    assert reasons(f) == {"empty-batch": 2}


def test_a_module_with_a_method_of_its_own_named_like_ours_is_told_of(device, caplog):
    class Mine(nn.Module):
        def verify(self):
            return "mine"

        def forward(self, x):
            return x

    f = wrap(Mine(), LADDER)
    assert "verify" in caplog.text
    assert f.unwrap().verify() == "mine"


def test_a_decorated_method_serves_each_object_from_graphs_of_its_own(device):
    class Encoder(nn.Module):
        def __init__(self, scale):
            super().__init__()
            self.scale = nn.Parameter(torch.tensor(scale, device=device))

        @functools.partial(graphed, ladder=LADDER)
        def encode(self, x):
            return x * self.scale

    one, two = Encoder(2.0), Encoder(3.0)
    x = randn(3, WIDTH, device=device)
    for _ in range(2):
        assert same(one.encode(x), x * 2)
        assert same(two.encode(x), x * 3)
    assert one.encode.report().replays == 2
    assert reasons(one.encode) == {}


def test_a_head_learns_from_results_that_were_made_under_no_grad(device):
    body, head = nn.Linear(WIDTH, WIDTH).to(device), nn.Linear(WIDTH, 1).to(device)
    f = wrap(body, LADDER)
    x = randn(3, WIDTH, device=device)
    with torch.no_grad():
        first = f(x)
    loss = head(first).sum()
    with torch.no_grad():
        f(randn(3, WIDTH, device=device, seed=1))
    loss.backward()
    assert torch.allclose(head.weight.grad[0], body(x).sum(0), atol=1e-5)


# -- verification --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "step",
    [
        lambda x: x[:, 0].argsort(),
        lambda x: (x[:, 0][None] < x[:, 0][:, None]).sum(1),
        lambda x: x + 0.05 * x.mean(0),
    ],
    ids=["argsort", "rank", "a little mean"],
)
def test_a_small_dependence_on_the_batch_is_refused_too(device, step):
    f, x = wrap(step, LADDER), randn(5, WIDTH, device=device)
    assert same(f(x), step(x))
    assert all("depends on the batch" in cause for cause in f.report().failures.values())


def test_complex_results_and_large_ones_are_verified_as_right(device):
    f = wrap(torch.fft.rfft, LADDER)
    f(randn(3, WIDTH, device=device))
    assert f.verify().passed
    torch.manual_seed(0)
    layers = nn.Sequential(*(nn.Linear(64, 64) for _ in range(6))).to(device)
    for layer in layers:
        nn.init.normal_(layer.weight, std=0.3)
    g = wrap(layers, [1, 4, 16])
    g(randn(3, 64, device=device) * 10)
    assert g.verify(tolerance=1e-3 if device.type == "cuda" else None).passed


def test_verify_looks_at_addresses_first(device):
    module = nn.Embedding(10, WIDTH).to(device)
    f = wrap(module, LADDER)
    f(torch.tensor([3], device=device))
    module.weight = nn.Parameter(module.weight.detach().clone())
    with pytest.raises(AddressError, match="weight"):
        f.verify()


def test_integers_between_those_of_the_first_call_are_tried_too(device):
    if device.type == "cuda":
        pytest.skip("an index that is illegal would end the process: on a GPU verify draws no integers")
    step = lambda ids: torch.where(ids == 5, ids * len(ids), ids)  # noqa: E731
    f = wrap(step, LADDER)
    f(torch.tensor([1, 9, 3], device=device))
    found = []
    for seed in range(20):
        try:
            f.verify(seed=seed)
        except VerifyError as error:
            found.append(str(error))
    assert any("depends on the batch" in text for text in found)


def test_results_of_debug_mode_can_be_saved_and_copied(device, tmp_path):
    f = graphed(lambda x: x * 2, ladder=LADDER, debug=True)
    x = randn(3, WIDTH, device=device)
    out = f(x)
    torch.save(out, tmp_path / "out.pt")
    assert same(torch.load(tmp_path / "out.pt"), x * 2)
    twin = copy.deepcopy(out)
    f(x * 3)
    assert same(twin, x * 2)


def test_what_looks_for_errors_in_padding_is_refused_and_the_other_form_is_served(device):
    x = torch.eye(4, device=device).expand(3, 4, 4) * 2.0
    f, g = wrap(torch.linalg.inv, LADDER), wrap(lambda a: torch.linalg.inv_ex(a)[0], LADDER)
    for _ in range(2):
        assert torch.allclose(f(x), x / 4)
        assert torch.allclose(g(x), x / 4)
    assert f.report().graphs == ()


class Growing(nn.Module):
    """A table that is made anew when a longer sequence comes, as those of rotary embeddings are."""

    def __init__(self):
        super().__init__()
        self.table, self.length = None, 0

    def forward(self, x):
        if x.shape[1] > self.length:
            self.length = x.shape[1]
            self.table = torch.arange(self.length, device=x.device).float() / self.length
        return x * self.table[: x.shape[1], None]


def test_a_table_that_an_eager_call_made_anew_is_noticed(device):
    f, plain = pair(Growing(), device)
    for n, length in ((3, 5), (4, 5), (3, 9)):
        x = randn(n, length, WIDTH, device=device)
        assert agrees(f, plain, x)
    with pytest.raises(AddressError):
        f(randn(3, 5, WIDTH, device=device))
    f.recapture()
    x = randn(3, 5, WIDTH, device=device)
    assert agrees(f, plain, x)


def test_capturing_the_outer_wrapper_leaves_the_inner_one_alone(device):
    inner = wrap(nn.Linear(WIDTH, WIDTH).to(device), LADDER)
    outer = wrap(lambda x: inner(x) + 1, LADDER)
    outer(randn(3, WIDTH, device=device))
    outer.verify()
    assert inner.report().graphs == ()
    assert outer.report().replays == 1


def test_what_a_function_given_as_an_argument_closes_over_is_watched(device):
    weight = [randn(WIDTH, WIDTH, device=device)]
    given = lambda x: x @ weight[0]  # noqa: E731
    f, x = wrap(lambda x, inside: inside(x), LADDER), randn(3, WIDTH, device=device)
    f(x, given)
    weight[0] = weight[0] * 2
    with pytest.raises(AddressError, match="weight"):
        f(x, given)


def test_a_decomposition_is_right_on_every_rung(device):
    for ladder in ([1], LADDER):
        f = wrap(torch.linalg.qr, ladder)
        for n in (1, 1, 3, 8):
            a = randn(n, 4, 4, device=device, seed=n)
            q, r = f(a)
            assert torch.allclose(q @ r, a, atol=1e-4)
            assert torch.allclose(r, r.triu(), atol=1e-5)


class Rebinding(nn.Module):
    """Assigns a buffer that it never reads."""

    def __init__(self):
        super().__init__()
        self.register_buffer("last", torch.zeros(1))

    def forward(self, x):
        self.last = x.sum(1)
        return x * 2


def test_a_buffer_that_is_assigned_in_every_call_is_right(device):
    f, plain = pair(Rebinding(), device)
    for x in batches(device):
        assert agrees(f, plain, x)
        assert torch.allclose(f.last, plain.last, atol=1e-5)


def test_verify_in_another_mode_says_so(device):
    f = wrap(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5)).to(device).eval(), LADDER)
    f(randn(3, WIDTH, device=device))
    f.train()
    with pytest.raises(VerifyError, match="training-mode-changed"):
        f.verify()
    f.eval()
    assert f.verify().passed


@pytest.mark.filterwarnings("ignore")
def test_scripted_modules_are_served_or_run_as_they_are(device):
    module = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()).to(device).eval()
    example = randn(3, WIDTH, device=device)
    for scripted in (torch.jit.script(module), torch.jit.trace(module, example)):
        f = wrap(lambda x, scripted=scripted: scripted(x), LADDER)
        for x in batches(device):
            assert agrees(f, module, x)


# -- deeper --------------------------------------------------------------------------------------------


class Cell:
    """A cache of a layer."""

    def __init__(self, device):
        self.total = torch.zeros(WIDTH, device=device)


class Layered(nn.Module):
    """Caches in a list of objects."""

    def __init__(self, device):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, device=device)
        self.caches = [Cell(device), Cell(device)]

    def forward(self, x):
        y = self.linear(x)
        for cache in self.caches:
            cache.total += 1
            y = y + cache.total
        return y


def test_caches_in_a_list_of_objects_that_is_made_anew_are_noticed(device):
    module = Layered(device)
    f, x = wrap(module, LADDER), randn(3, WIDTH, device=device)
    f(x)
    module.caches = [Cell(device), Cell(device)]
    with pytest.raises(AddressError, match="caches"):
        f(x)


class Slotted:
    """State in a slot."""

    __slots__ = ("value",)

    def __init__(self, value):
        self.value = value


class InASlot(nn.Module):
    """State that is kept by assignment where there is no dictionary."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.state = Slotted(torch.zeros(WIDTH))

    def forward(self, x):
        self.state.value = self.state.value.to(x.device) + 1
        return self.linear(x) + self.state.value


class InAQueue(nn.Module):
    """The results of the last calls."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.last = deque([torch.zeros(8, WIDTH)] * 3, maxlen=3)

    def forward(self, x):
        y = self.linear(x)
        result = y + self.last[0][: len(x)].to(x.device)
        self.last.append(y)
        return result


class InAnObject(nn.Module):
    """Leaves its result in an object of its own making."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.info = None

    def forward(self, x):
        y = self.linear(x)
        self.info = SimpleNamespace(double=y * 2)
        return y


@pytest.mark.parametrize("kind", [InASlot, InAQueue])
def test_state_in_slots_and_queues_is_right(device, kind):
    f, plain = pair(kind(), device)
    for x in batches(device, (4, 4, 4, 4, 4)):
        assert agrees(f, plain, x)


def test_what_is_left_in_an_object_of_every_call_is_that_of_the_call(device):
    f, plain = pair(InAnObject(), device)
    for x in batches(device):
        assert agrees(f, plain, x)
        assert torch.allclose(f.info.double, plain.info.double, atol=1e-5)


def test_a_list_that_a_hook_fills_and_the_caller_clears(device):
    found, module = [], nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()).to(device)
    module[0].register_forward_hook(lambda module, args, out: found.append(out))
    f = wrap(module, LADDER)
    for x in batches(device):
        found.clear()
        f(x)
        with torch.no_grad():
            assert torch.allclose(found[0], F.linear(x, module[0].weight, module[0].bias), atol=1e-5)
        assert len(found) == 1


POSITION = 0


def counting_globally(x):
    """A position that is a global variable."""
    global POSITION
    POSITION += 1
    return x + POSITION


class OnTheClass(nn.Module):
    """A position that belongs to the class."""

    position = 0

    def forward(self, x):
        OnTheClass.position += 1
        return x + OnTheClass.position


def test_positions_in_globals_and_on_classes_are_right(device):
    global POSITION
    POSITION = OnTheClass.position = 0
    x = randn(3, WIDTH, device=device)
    for f in (wrap(counting_globally, LADDER), wrap(OnTheClass(), LADDER)):
        for count in (1, 2, 3):
            assert same(f(x), x + count)


def test_what_is_initialised_once_stays_initialised(device):
    ready = []

    class Once(nn.Module):
        def __init__(self):
            super().__init__()
            self.is_ready = False

        def forward(self, x):
            if not self.is_ready:
                assert not ready, "initialised twice"
                ready.append(True)
                self.is_ready = True
            return x * 2

    f = wrap(Once(), LADDER)
    for x in batches(device):
        assert same(f(x), x * 2)
    assert f.report().replays >= 5


def test_what_another_thread_does_meanwhile_is_not_undone(device):
    class Engine:
        def __init__(self):
            self.pending, self.begun = {}, threading.Event()
            self.weight = randn(WIDTH, device=device)

        def step(self, x):
            self.begun.set()
            time.sleep(0.01)
            return x * self.weight

    engine = Engine()
    f, x = wrap(engine.step, LADDER), randn(3, WIDTH, device=device)

    def put():
        engine.begun.wait()
        engine.pending["request"] = "from elsewhere"

    thread = threading.Thread(target=put)
    thread.start()
    f(x)
    thread.join()
    assert engine.pending == {"request": "from elsewhere"}


def test_after_a_capture_ahead_of_time_attributes_are_as_before(device):
    module = Aux().to(device)
    f, x = wrap(module, LADDER), randn(3, WIDTH, device=device)
    f.capture(x)
    assert module.aux is None
    f(x)
    with torch.no_grad():
        assert torch.allclose(module.aux, (module.linear(x) ** 2).sum(-1), atol=1e-4)


def test_after_the_first_call_attributes_are_those_of_that_call(device):
    module = Aux().to(device)
    f, x = wrap(module, LADDER), randn(3, WIDTH, device=device)
    f(x)
    with torch.no_grad():
        assert torch.allclose(
            module.aux, (F.linear(x, module.linear.weight, module.linear.bias) ** 2).sum(-1)
        )


def test_attributes_that_only_some_sizes_get_are_right(device):
    class Some(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.aux, self.always = nn.Linear(WIDTH, WIDTH), None, None

        def forward(self, x):
            y = self.linear(x)
            self.always = y * 3
            if len(x) <= 2:
                self.aux = y * 2
            return y

    f, plain = pair(Some(), device)
    for x in batches(device, (3, 2, 4, 1)):
        assert agrees(f, plain, x)
        assert (f.aux is None) == (plain.aux is None)
        assert f.aux is None or torch.allclose(f.aux, plain.aux, atol=1e-5)


def test_steps_that_seed_themselves_give_the_same_numbers_every_time(device):
    def seeded(x):
        generator = torch.Generator(device).manual_seed(0)
        return x + torch.randn(WIDTH, generator=generator, device=device)

    f, x = wrap(seeded, LADDER), randn(3, WIDTH, device=device)
    for _ in range(3):
        assert same(f(x), seeded(x))


def test_a_default_device_does_not_matter(device):
    f, plain = pair(nn.Linear(WIDTH, WIDTH).eval(), device)
    xs = batches(device)
    with torch.device("meta" if device.type == "cpu" else device):
        assert all(agrees(f, plain, x) for x in xs)
        f.verify()
    assert not reasons(f)


def test_the_largest_of_a_batch_is_refused_also_where_zeros_do_not_show(device):
    step = lambda x: x + x.max(0).values  # noqa: E731
    f = wrap(step, LADDER)
    for n, sign in ((3, 1), (5, -1), (8, 1), (3, -1)):
        x = sign * (randn(n, WIDTH, device=device, seed=n).abs() + 1)
        assert same(f(x), step(x)), "zeros of padding are the largest of negative numbers alone"


EXTREMES = {"of all": lambda x: x - x.max(), "of a layer": lambda x: (x * 0.5 + 4).amax()}


@pytest.mark.parametrize("name", EXTREMES)
def test_an_extreme_is_refused_also_where_the_first_batch_does_not_show(device, name):
    """Numbers of both signs, whose largest is never padding."""
    step = EXTREMES[name]
    f = wrap(step, LADDER)
    for n, offset in ((3, 0), (3, -9), (1, 0), (1, -9)):
        x = randn(n, WIDTH, device=device, seed=n) + offset
        assert same(f(x), step(x))
    assert f.report().replays == 0


def test_rows_that_see_each_other_in_a_way_that_padding_does_not_change_are_served(device):
    f = wrap(lambda x: x / x.norm(), LADDER)
    for n in (3, 1, 8):
        x = randn(n, WIDTH, device=device, seed=n)
        assert torch.allclose(f(x), x / x.norm())
    assert f.report().replays == 3


def test_a_table_for_the_last_size_alone_is_right(device):
    class Remembering(nn.Module):
        def __init__(self):
            super().__init__()
            self.size, self.table = 0, None

        def forward(self, x):
            if len(x) != self.size:
                self.size, self.table = len(x), torch.ones(len(x), 1, device=x.device) * 2
            return x * self.table

    f, plain = pair(Remembering(), device)
    for x in batches(device):
        assert agrees(f, plain, x)


def test_objects_that_compare_equal_have_wrappers_of_their_own(device):
    @dataclass
    class Encoder:
        name: str

        @functools.partial(graphed, ladder=LADDER)
        def encode(self, x):
            return x * self.weight

    one, two = Encoder("same"), Encoder("same")
    one.weight, two.weight = randn(WIDTH, device=device), randn(WIDTH, device=device, seed=1)
    x = randn(3, WIDTH, device=device)
    assert same(one.encode(x), x * one.weight)
    assert same(two.encode(x), x * two.weight)


def test_a_wrapper_keeps_neither_arguments_nor_results_of_its_first_call(device):
    f = wrap(nn.Linear(WIDTH, WIDTH).to(device), LADDER)
    x = randn(3, WIDTH, device=device)
    held = weakref.ref(x)
    f(x)
    del x
    gc.collect()
    assert held() is None


def test_a_large_vocabulary_does_not_make_the_first_call_slow(device):
    seconds = []
    for entries in (0, 0, 300_000):
        module = nn.Linear(WIDTH, WIDTH).to(device)
        module.vocabulary = {f"token {i}": i for i in range(entries)}
        f = wrap(module, LADDER)
        began = time.process_time()
        f(randn(3, WIDTH, device=device))
        seconds.append(time.process_time() - began)
    assert seconds[2] < seconds[1] + 1, "it is looked at once and passed over"


def test_globals_that_only_share_a_name_with_an_attribute_may_change(device):
    global logits
    module = nn.Linear(WIDTH, WIDTH).to(device)

    def step(x):
        return SimpleNamespace(logits=module(x)).logits

    x = randn(3, WIDTH, device=device)
    logits = step(x)
    f = wrap(step, LADDER)
    f(x)
    logits = f(x)
    assert f(x) is not None
    assert f.report().replays == 3


def test_attention_that_could_drop_out_and_does_not_is_served(device):
    def step(x):
        heads = x.view(len(x), 1, 2, WIDTH // 2)
        return F.scaled_dot_product_attention(heads, heads, heads).flatten(1)

    f = wrap(step, LADDER)
    for x in batches(device):
        assert agrees(f, step, x)
    assert f.report().replays == 6


def test_a_seed_set_inside_is_kept_to(device):
    def seeded(x):
        torch.manual_seed(0)
        return x + torch.randn(WIDTH).to(x.device)

    f, x = wrap(seeded, LADDER), randn(3, WIDTH, device=device)
    wanted = seeded(x)
    for _ in range(3):
        assert same(f(x), wanted)


# -- what torch itself compiles ------------------------------------------------------------------------


def counting(runs):
    """A backend of torch.compile that counts how often compiled code runs."""

    def backend(module, examples):
        def run(*args):
            runs.append(len(examples))
            return module.forward(*args)

        return run

    return backend


def test_compiled_functions_stay_compiled(device):
    """torch runs what it has compiled uncompiled under any mode, and would from then on for ever."""
    runs = []
    warm, cold = (torch.compile(F.gelu, backend=counting(runs), dynamic=True) for _ in range(2))
    x = randn(3, WIDTH, device=device)
    warm(x)
    for function in (warm, cold):
        f = wrap(lambda x, function=function: function(x) + 1, LADDER)
        for each in batches(device):
            assert agrees(f, lambda x: F.gelu(x) + 1, each)
        assert (reasons(f), f.report().replays) == ({}, 6)
        before = len(runs)
        function(x)
        assert len(runs) == before + 1


HIGHER_ORDER = {
    "cond": lambda x: torch.cond(x.sum() > 0, lambda y: y + 1, lambda y: y - 1, (x,)),
    "while_loop": lambda x: torch._higher_order_ops.while_loop(
        lambda i, y: i < 3, lambda i, y: (i + 1, y * 2), (torch.zeros((), dtype=torch.int64), x)
    )[1],
}


@pytest.mark.parametrize("name", HIGHER_ORDER)
def test_operators_over_functions_run_eagerly_with_a_reason(device, name):
    step, f = HIGHER_ORDER[name], wrap(HIGHER_ORDER[name], LADDER)
    for x in batches(device, (3, 2, 3)):
        for sign in (1, -1):
            assert same(f(sign * x.abs()), step(sign * x.abs()))
    assert reasons(f) == {"capture-failed": 6}
    assert all(name in why and "torch.where" in why for why in f.report().failures.values())


def test_a_step_that_fails_only_while_it_is_watched_runs_eagerly(device):
    calls = []

    def step(x):
        if torch._C._len_torch_dispatch_stack():
            raise RuntimeError("no modes here")
        calls.append(len(x))
        return x + 1

    f = wrap(step, LADDER)
    for x in batches(device, (3, 2)):
        assert same(f(x), x + 1)
    assert (calls, reasons(f)) == ([3, 2], {"first-call": 1, "capture-failed": 1})
    assert all("no modes here" in why for why in f.report().failures.values())


def test_a_step_that_fails_by_itself_raises_that_and_is_captured_when_it_works(device):
    def step(x):
        if x.shape[1] != WIDTH:
            raise ValueError("of another width")
        return x + 1

    f = wrap(step, LADDER)
    with pytest.raises(ValueError, match="of another width"):
        f(randn(3, WIDTH + 1, device=device))
    x = randn(3, WIDTH, device=device)
    assert same(f(x), x + 1)
    assert (reasons(f), f.report().replays) == ({}, 1)
