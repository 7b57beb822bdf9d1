"""What changes behind a graph's back: weights, attributes, modes, and whatever a function reaches."""

import functools

import numpy as np
import pytest
import torch

from contract.steps import WIDTH, CallCounter, close, make_runner, mlp, padded, randn, reasons, same, wrap
from ostinato.graphs import AddressError

FACTOR = 2.0
TABLE = None
MODEL = None


def autocast(device):
    return torch.autocast(device.type, dtype=torch.bfloat16)


# -- recapture takes the present surroundings ----------------------------------------------------------


def test_recapture_takes_the_present_training_mode(device):
    model = torch.nn.Sequential(mlp(device), torch.nn.Dropout(0.5)).train()
    f = wrap(model)
    x = randn(3, WIDTH, device=device)
    f(x)
    f.eval()
    f.recapture()
    replays = f.report().replays
    with torch.no_grad():
        wanted = model(padded(x, 4))[:3]
    for _ in range(2):
        assert same(f(x), wanted)
    assert (reasons(f), f.report().replays) == ({}, replays + 2)
    f.train()
    assert not same(f(x), wanted)
    assert reasons(f) == {"training-mode-changed": 1}


def test_recapture_under_autocast_serves_autocast_and_nothing_else(device):
    model = mlp(device)
    f = wrap(model)
    x = randn(3, WIDTH, device=device)
    assert f(x).dtype is torch.float32
    with autocast(device):
        f.recapture()
        with torch.no_grad():
            wanted = model(padded(x, 4))[:3]
        out = f(x)
    assert out.dtype is torch.bfloat16
    assert same(out, wanted)
    assert reasons(f) == {}
    plain = f(x)
    assert plain.dtype is torch.float32
    with torch.no_grad():
        assert close(plain, model(x))
    assert reasons(f) == {"autocast-changed": 1}
    f.recapture()
    assert f(x).dtype is torch.float32
    assert reasons(f) == {"autocast-changed": 1}


# -- weights -------------------------------------------------------------------------------------------


def clone_of(parameter):
    return torch.nn.Parameter(parameter.detach().clone() * 1.5)


def moved(parameter):
    parameter.data = parameter.data.clone() * 1.5


def linear_like(layer):
    new = torch.nn.Linear(layer.in_features, layer.out_features).to(layer.weight.device)
    return new.requires_grad_(False)


def state_of(model):
    return {name: tensor.clone() * 1.5 for name, tensor in model.state_dict().items()}


CHANGES = {
    "to through the wrapper": (lambda f, model: f.double().float(), r"0\.weight"),
    "to through the original": (lambda f, model: model.double().float(), r"0\.weight"),
    "another type": (lambda f, model: model[2].half(), r"2\.weight"),
    "data through the wrapper": (lambda f, model: moved(f[0].weight), r"0\.weight"),
    "data through the original": (lambda f, model: moved(model[2].bias), r"2\.bias"),
    "a buffer's data": (lambda f, model: moved(model[3].running_mean), r"3\.running_mean"),
    "a buffer replaced": (
        lambda f, model: setattr(model[3], "running_var", model[3].running_var + 1),
        r"3\.running_var",
    ),
    "a parameter replaced through the wrapper": (
        lambda f, model: setattr(f[0], "weight", clone_of(f[0].weight)),
        r"0\.weight",
    ),
    "a parameter replaced through the original": (
        lambda f, model: setattr(model[0], "weight", clone_of(model[0].weight)),
        r"0\.weight",
    ),
    "a parameter's tensor swapped": (
        lambda f, model: torch.utils.swap_tensors(model[0].weight, clone_of(model[0].weight)),
        r"0\.weight",
    ),
    "a parameter's storage moved": (
        lambda f, model: model[0].weight.untyped_storage().resize_(1 << 20),
        r"0\.weight",
    ),
    "a parameter taken away": (lambda f, model: model[2].register_parameter("bias", None), r"2\.bias"),
    "a layer set through the wrapper": (lambda f, model: f.__setitem__(0, linear_like(f[0])), "0"),
    "a layer set through the original": (lambda f, model: model.__setitem__(2, linear_like(model[2])), "2"),
    "a layer without weights": (lambda f, model: model.__setitem__(1, torch.nn.ReLU()), "1"),
    "a layer without weights through the wrapper": (lambda f, model: f.__setitem__(1, torch.nn.ReLU()), "1"),
    "load through the wrapper": (
        lambda f, model: f.load_state_dict(state_of(model), assign=True),
        r"0\.weight",
    ),
    "load through the original": (
        lambda f, model: model.load_state_dict(state_of(model), assign=True),
        r"0\.weight",
    ),
    "to through a parent": (lambda f, model: torch.nn.Sequential(f).double().float(), r"0\.weight"),
}


def small_model(device):
    return torch.nn.Sequential(*mlp(device), torch.nn.BatchNorm1d(WIDTH, device=device)).eval()


@pytest.mark.parametrize("change", CHANGES)
def test_what_moved_or_was_replaced_is_named_at_the_next_call(device, change):
    act, name = CHANGES[change]
    model = small_model(device)
    f = wrap(model)
    x = randn(3, WIDTH, device=device)
    f(x)
    act(f, model)
    for _ in range(2):
        with pytest.raises(AddressError, match=rf"(?<!\w){name}(?!\w)"):
            f(x)
    model.float()
    f.recapture()
    with torch.no_grad():
        wanted = model(padded(x, 4))[:3]
    assert same(f(x), wanted)


@pytest.mark.parametrize(
    "change",
    [
        lambda weight: weight.t_(),
        lambda weight: weight.unsqueeze_(0),
        lambda weight: weight.resize_(1, WIDTH),
        lambda weight: weight.as_strided_((WIDTH, WIDTH), (0, 1)),
        lambda weight: weight.as_strided_((WIDTH, WIDTH), (WIDTH, 0)),
    ],
    ids=["transposed", "another rank", "other rows", "other first stride", "other last stride"],
)
@torch.no_grad()
def test_a_weight_laid_out_otherwise_in_the_same_place_is_noticed(device, change):
    model = torch.nn.Linear(WIDTH, WIDTH).to(device).requires_grad_(False)
    f, x = wrap(model), randn(3, WIDTH, device=device)
    for _ in range(3):
        f(x)
    change(model.weight)
    with pytest.raises(AddressError, match="weight"):
        f(x)


@pytest.mark.parametrize(
    "touch",
    [
        lambda model: model.float(),
        lambda model: moved_in_place(model),
        lambda model: setattr(model[0].weight, "data", model[0].weight.data),
        lambda model: model.load_state_dict(state_of(model)),
        lambda model: setattr(model[0], "weight", model[0].weight),
        lambda model: model.__setitem__(1, model[1]),
    ],
)
def test_what_stays_in_place_is_served_with_its_new_values(device, touch):
    model = small_model(device)
    f = wrap(model)
    x = randn(3, WIDTH, device=device)
    f(x)
    touch(model)
    with torch.no_grad():
        wanted = model(padded(x, 4))[:3]
    assert same(f(x), wanted)
    assert (reasons(f), f.report().replays) == ({}, 2)


def moved_in_place(model):
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)


def test_weights_lent_for_one_call_are_used_and_those_that_come_back_are_served(device):
    model = mlp(device)
    f = wrap(model)
    x = randn(3, WIDTH, device=device)
    before = f(x).clone()
    lent = {name: p.detach() * 3 for name, p in model.named_parameters()}
    wanted = torch.func.functional_call(model, lent, (x,))
    assert same(torch.func.functional_call(f, lent, (x,)), wanted)
    assert same(f(x), before)
    parent = torch.nn.Sequential(f)
    of_parent = {f"0.{name}": tensor for name, tensor in lent.items()}
    assert same(torch.func.functional_call(parent, of_parent, (x,)), wanted)
    assert same(f(x), before)
    assert reasons(f) == {"inside-transform": 2}
    own = dict(model.named_parameters())
    assert same(torch.func.functional_call(f, own, (x,)), before)


class Tied(torch.nn.Module):
    def __init__(self, device):
        super().__init__()
        self.first = torch.nn.Linear(WIDTH, WIDTH, bias=False, device=device)
        self.second = torch.nn.Linear(WIDTH, WIDTH, bias=False, device=device)
        self.second.weight = self.first.weight

    def forward(self, x):
        return self.second(self.first(x))


@pytest.mark.parametrize("untied", ["first", "second"])
def test_untying_a_tied_weight_is_noticed_under_its_name(device, untied):
    model = Tied(device)
    f = wrap(model)
    x = randn(3, WIDTH, device=device)
    f(x)
    setattr(model.get_submodule(untied), "weight", clone_of(model.first.weight))  # noqa: B010
    with pytest.raises(AddressError, match=rf"{untied}\.weight"):
        f(x)


# -- attributes ----------------------------------------------------------------------------------------


class Scaled(torch.nn.Module):
    default = 5.0

    def __init__(self, scale=2.0):
        super().__init__()
        self.scale = scale
        self.options = {"shift": 1.0}
        self.default = 1.0
        self.inner = torch.nn.Identity()
        self.inner.power = 1

    def forward(self, x):
        return x**self.inner.power * self.scale * self.default + self.options["shift"]


def changed(f, wanted, x):
    """The call ran eagerly because of an attribute, and is right."""
    before = reasons(f).get("attribute-changed", 0)
    assert same(f(x), wanted)
    assert reasons(f) == {"attribute-changed": before + 1}
    return True


def test_an_attribute_set_through_the_wrapper_runs_eagerly_until_it_is_captured_again(device):
    model = Scaled()
    f = wrap(model)
    x = randn(3, WIDTH, device=device)
    assert same(f(x), x * 2 + 1)
    f.scale = 3.0
    assert model.scale == 3.0
    assert changed(f, x * 3 + 1, x)
    assert changed(f, x * 3 + 1, x)
    f.recapture()
    replays = f.report().replays
    assert same(f(x), x * 3 + 1)
    assert f.report().replays == replays + 1
    f.options = {"shift": 4.0}
    assert same(f(x), x * 3 + 4)
    assert reasons(f) == {"attribute-changed": 3}
    f.capture(x)
    replays = f.report().replays
    assert same(f(x), x * 3 + 4)
    assert f.report().replays == replays + 1


def test_an_attribute_that_is_deleted_runs_eagerly(device):
    f = wrap(Scaled())
    x = randn(3, WIDTH, device=device)
    f(x)
    del f.default
    assert changed(f, x * 2.0 * 5.0 + 1, x)


def test_an_attribute_that_is_counted_up_through_the_wrapper_is_changed(device):
    f = wrap(Scaled())
    x = randn(3, WIDTH, device=device)
    f(x)
    f.scale += 1
    assert changed(f, x * 3.0 + 1, x)


def test_an_equal_value_changes_nothing(device):
    f = wrap(Scaled())
    x = randn(3, WIDTH, device=device)
    f(x)
    f.scale = 2.0
    f.options = {"shift": 1.0}
    f.default = 1.0
    assert same(f(x), x * 2 + 1)
    assert (reasons(f), f.report().replays) == ({}, 2)


def test_a_number_of_another_type_is_another_value(device):
    f = wrap(Scaled(scale=2))
    f.options, f.default = {"shift": 1}, 1
    x = torch.arange(3 * WIDTH, device=device).view(3, WIDTH)
    assert f(x).dtype is torch.int64
    f.scale = 2.0
    assert f(x).dtype is torch.float32


def test_an_attribute_that_cannot_be_compared_counts_as_changed(device):
    f = wrap(Scaled())
    x = randn(3, WIDTH, device=device)
    f(x)
    f.note = np.arange(3)
    assert changed(f, x * 2 + 1, x)
    f.recapture()
    f.note = np.arange(3)
    assert same(f(x), x * 2 + 1)


def test_an_attribute_set_before_anything_was_captured_is_no_change(device):
    f = wrap(Scaled())
    f.scale = 7.0
    x = randn(3, WIDTH, device=device)
    assert same(f(x), x * 7 + 1)
    assert (reasons(f), f.report().replays) == ({}, 1)


@pytest.mark.parametrize("debug", [False, True])
@pytest.mark.parametrize("part", ["module", "submodule"])
def test_an_attribute_set_on_the_original_runs_eagerly_until_it_is_captured_again(device, part, debug):
    model = Scaled()
    f = wrap(model, debug=debug)
    x = randn(3, WIDTH, device=device)
    assert same(f(x).clone(), x * 2 + 1)
    assert same(f(x).clone(), x * 2 + 1)
    if part == "module":
        model.scale = 3.0
    else:
        model.inner.power = 2
    wanted = x * 3 + 1 if part == "module" else x**2 * 2 + 1
    assert changed(f, wanted, x)
    f.recapture()
    replays = f.report().replays
    assert same(f(x).clone(), wanted)
    assert f.report().replays == replays + 1


@pytest.mark.parametrize("debug", [False, True])
def test_a_changed_number_in_a_closure_runs_eagerly_until_it_is_captured_again(device, debug):
    scale = 2.0
    f = wrap(lambda x: x * scale, debug=debug)
    x = randn(3, WIDTH, device=device)
    assert same(f(x).clone(), x * 2)
    scale = 3.0
    assert changed(f, x * 3, x)
    f.recapture()
    assert same(f(x).clone(), x * 3)
    assert reasons(f) == {"attribute-changed": 1}


def test_a_changed_global_is_named(device, monkeypatch, caplog):
    f = wrap(scaled_by_a_global)
    x = randn(3, WIDTH, device=device)
    assert same(f(x).clone(), x * 2)
    monkeypatch.setitem(scaled_by_a_global.__globals__, "FACTOR", 3.0)
    assert changed(f, x * 3, x)
    assert "FACTOR" in caplog.text


def test_a_number_that_was_set_back_and_equal_ones_are_no_change(device):
    model = Scaled()
    f = wrap(model)
    x = randn(3, WIDTH, device=device)
    f(x)
    model.scale = 3.0
    assert changed(f, x * 3 + 1, x)
    for equal in (2.0, float("2"), np.float64(4) / 2):
        model.scale = equal
        before = f.report().replays
        for _ in range(2):
            assert same(f(x).clone(), x * 2 + 1)
        assert f.report().replays == before + (2 if type(equal) is float else 0)
    assert model.scale == 2.0


def test_what_no_code_mentions_may_change(device):
    """A trainer's notes beside a model, made anew and growing; graphs go on."""
    model = Scaled()
    f = wrap(model)
    x = randn(3, WIDTH, device=device)
    f(x)
    for number in range(3):
        model.history = [*getattr(model, "history", []), number]
        model.epoch = number
        assert same(f(x).clone(), x * 2 + 1)
    assert (reasons(f), f.report().replays) == ({}, 4)


def test_an_equal_value_in_the_place_of_another_is_compared_as_fast_from_then_on(device):
    model = Scaled()
    f = wrap(model)
    x = randn(3, WIDTH, device=device)
    f(x)
    (entry,) = f.graph_call._entries
    model.scale = float("2")
    assert not entry.is_standing()
    for _ in range(3):
        f(x)
        assert entry.is_standing()
    for _ in range(20):  # in every call, it is looked at one by one
        model.scale = float("2")
        assert same(f(x).clone(), x * 2 + 1)
    assert entry.num_equal_changes < 10
    model.scale = 3.0
    assert changed(f, x * 3 + 1, x)


def scaled_by_a_global(x):
    return x * FACTOR


# -- what functions reach ------------------------------------------------------------------------------


class Holder:
    def __init__(self, model, table):
        self.model, self.table = model, table

    def apply(self, x):
        return self.model(x) + self.table


def with_globals(x):
    return MODEL(x) + TABLE


def reached_by(way, model, table, monkeypatch):
    """A function that finds a model and a table in one of the ways functions find things."""
    if way == "closure":
        return lambda x: model(x) + table
    if way == "partial":
        return functools.partial(lambda model, table, x: model(x) + table, model, table)
    if way == "keyword of a partial":
        return functools.partial(lambda x, *, model, table: model(x) + table, model=model, table=table)
    if way == "bound method":
        return Holder(model, table).apply
    if way == "default":

        def step(x, model=model, *, table=table):
            return model(x) + table

        return step
    monkeypatch.setitem(with_globals.__globals__, "MODEL", model)
    monkeypatch.setitem(with_globals.__globals__, "TABLE", table)
    return with_globals


WAYS = pytest.mark.parametrize(
    "way", ["closure", "partial", "keyword of a partial", "bound method", "default", "globals"]
)


@WAYS
@pytest.mark.parametrize("change", ["moved", "replaced", "moved table"])
def test_what_a_function_reaches_is_watched(device, way, change, monkeypatch):
    model, table = mlp(device), randn(WIDTH, device=device, seed=5)
    step = reached_by(way, model, table, monkeypatch)
    f = wrap(step)
    x = randn(3, WIDTH, device=device)
    f(x)
    if change == "moved":
        moved(model[2].weight)
    elif change == "replaced":
        model[2].weight = clone_of(model[2].weight)
    else:
        moved(table)
    name = r"2\.weight"
    if change == "moved table":
        name = None if way == "partial" else "(?i)table"
    for _ in range(2):
        with pytest.raises(AddressError, match=name):
            f(x)
    f.recapture()
    with torch.no_grad():
        assert same(f(x), step(padded(x, 4))[:3])


@pytest.mark.parametrize("what", ["table", "model"])
def test_a_name_of_a_closure_bound_to_something_else_is_noticed(device, what):
    model, table = mlp(device), randn(WIDTH, device=device, seed=5)
    f = wrap(lambda x: model(x) + table)
    x = randn(3, WIDTH, device=device)
    f(x)
    if what == "table":
        table = table * 2
    else:
        model = torch.nn.Sequential(*mlp(device)).requires_grad_(False)
    with pytest.raises(AddressError, match="table" if what == "table" else "model|weight"):
        f(x)
    f.recapture()
    with torch.no_grad():
        assert same(f(x), model(padded(x, 4))[:3] + table)


def test_a_global_bound_to_something_else_is_noticed(device, monkeypatch):
    scope = with_globals.__globals__
    monkeypatch.setitem(scope, "MODEL", mlp(device))
    monkeypatch.setitem(scope, "TABLE", randn(WIDTH, device=device, seed=5))
    f = wrap(with_globals)
    x = randn(3, WIDTH, device=device)
    f(x)
    monkeypatch.setitem(scope, "TABLE", randn(WIDTH, device=device, seed=6))
    with pytest.raises(AddressError, match="TABLE"):
        f(x)


def test_an_attribute_of_a_bound_methods_object_that_was_replaced_is_noticed(device):
    holder = Holder(mlp(device), randn(WIDTH, device=device))
    f = wrap(holder.apply)
    x = randn(3, WIDTH, device=device)
    f(x)
    holder.table = holder.table * 2
    with pytest.raises(AddressError, match="table"):
        f(x)


def test_what_a_step_read_from_anywhere_is_watched_for_moving(device):
    layers = {"all": [mlp(device), mlp(device)]}
    step = CallCounter(lambda x: layers["all"][1](layers["all"][0](x)))
    f = wrap(step)
    x = randn(3, WIDTH, device=device)
    f(x)
    moved(layers["all"][1][0].weight)
    with pytest.raises(AddressError):
        f(x)
    f.recapture()
    with torch.no_grad():
        assert same(f(x), step(padded(x, 4))[:3])


def test_what_a_step_read_from_anywhere_is_watched_for_dying(device):
    tables = {"deep": [randn(WIDTH, device=device)]}
    step = CallCounter(lambda x: x + tables["deep"][0])
    f = wrap(step)
    x = randn(3, WIDTH, device=device)
    f(x)
    tables["deep"][0] = randn(WIDTH, device=device, seed=1)
    with pytest.raises(AddressError):
        f(x)
    f.recapture()
    assert same(f(x), x + tables["deep"][0])


def test_a_function_is_served_as_long_as_all_it_reaches_stays(device):
    model, table = mlp(device), randn(WIDTH, device=device, seed=5)
    f = wrap(lambda x: model(x) + table)
    x = randn(3, WIDTH, device=device)
    for scale in (1.0, 1.5, 0.5):
        with torch.no_grad():
            model[0].weight.mul_(scale)
            table.add_(scale)
            assert same(f(x), model(padded(x, 4))[:3] + table)
    assert (reasons(f), f.report().replays) == ({}, 3)


# -- watch ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("which", [0, 1])
def test_two_watched_modules_with_the_same_names_do_not_hide_each_other(device, which):
    models = [mlp(device), mlp(device)]
    runner = make_runner(device, lambda x: models[1](models[0](x)), [2])
    for model in models:
        runner.watch(model)
    runner.check_addresses()
    moved(models[which][0].weight)
    with pytest.raises(AddressError, match=r"0\.weight"):
        runner.check_addresses()


def test_two_watched_mappings_with_the_same_name_do_not_hide_each_other(device):
    tables = [randn(WIDTH, device=device, seed=i) for i in range(2)]
    runner = make_runner(device, lambda x: x + tables[0] + tables[1], [2])
    for table in tables:
        runner.watch({"table": table})
    moved(tables[0])
    with pytest.raises(AddressError, match="table"):
        runner.check_addresses()


@pytest.mark.parametrize("untied", ["first", "second"])
def test_a_tied_weight_is_watched_under_both_names(device, untied):
    model = Tied(device)
    runner = make_runner(device, lambda x: model(x), [2])
    runner.watch(model)
    setattr(model.get_submodule(untied), "weight", clone_of(model.first.weight))  # noqa: B010
    with pytest.raises(AddressError, match=rf"{untied}\.weight"):
        runner.check_addresses()


def test_watched_modules_are_right_again_after_a_new_capture(device):
    models = [mlp(device), mlp(device)]
    runner = make_runner(device, lambda x: models[1](models[0](x)), [2])
    for model in models:
        runner.watch(model)
        moved(model[0].weight)
    runner.drop()
    runner.capture(progress=False)
    runner.check_addresses()


class Stack(torch.nn.Module):
    def __init__(self, first):
        super().__init__()
        self.first, self.more = first, torch.nn.ModuleList()

    def forward(self, x):
        return functools.reduce(lambda y, layer: layer(y), self.more, self.first(x))


def test_a_layer_that_is_appended_is_noticed(device):
    model = Stack(mlp(device)).eval()
    x = randn(3, WIDTH, device=device)
    f = wrap(model)
    for container in (model.first, model.more):
        f(x)
        f(x)
        container.append(torch.nn.Tanh())
        with pytest.raises(AddressError, match="a module to which layers were added"):
            f(x)
        f.recapture()
        assert close(f(x), model(x))
