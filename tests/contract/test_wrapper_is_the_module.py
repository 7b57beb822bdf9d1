"""The wrapper of a module is a module of its class, whatever the class overrides."""

import abc
import copy

import pytest
import torch

from contract.steps import WIDTH, mlp, padded, randn, reasons, same, wrap
from ostinato.graphs import ConfigError


class Fussy(torch.nn.Module):
    """A class that has its own opinion about everything a wrapper could leave to nn.Module."""

    kind = "fussy"

    def __init__(self, blocks: int, device: torch.device) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList(torch.nn.Linear(WIDTH, WIDTH, device=device) for _ in range(blocks))
        self.norm = torch.nn.BatchNorm1d(WIDTH, device=device)
        self.trained_steps = 0
        self.__secret = "mine"

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.norm(x)

    def train(self, mode=True):
        super().train(mode)
        self.norm.eval()
        return self

    def parameters(self, recurse=True):
        return self.blocks[-1].parameters(recurse)

    def state_dict(self, *args, **kwargs):
        state = super().state_dict(*args, **kwargs)
        state[kwargs.get("prefix", "") + "signed"] = torch.ones(1)
        return state

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "saved_by"] = torch.tensor([len(self)])

    def _load_from_state_dict(self, state_dict, prefix, *args):
        state_dict.pop(prefix + "saved_by", None)
        state_dict.pop(prefix + "signed", None)
        super()._load_from_state_dict(state_dict, prefix, *args)

    def get_extra_state(self):
        return {"trained_steps": self.trained_steps}

    def set_extra_state(self, state):
        self.trained_steps = state["trained_steps"]

    def __len__(self):
        return len(self.blocks)

    def __getitem__(self, index):
        return self.blocks[index]

    def __setitem__(self, index, block):
        self.blocks[index] = block

    def __contains__(self, block):
        return any(block is mine for mine in self.blocks)

    @property
    def secret(self):
        return self.__secret

    @secret.setter
    def secret(self, value):
        self.__secret = value

    @classmethod
    def named(cls):
        return cls.kind

    @staticmethod
    def answer():
        return 42

    def me(self):
        return self

    def extra_repr(self):
        return f"of {len(self)}"


@pytest.fixture
def pair(device):
    torch.manual_seed(0)
    model = Fussy(2, device).eval()
    return model, wrap(model)


def served(f, model, device, n=3):
    """Calls come from graphs and are right."""
    x = randn(n, WIDTH, device=device)
    before = f.report().replays
    with torch.no_grad():
        wanted = model(padded(x, 4))[:n]
    assert same(f(x), wanted)
    assert f.report().replays == before + 1
    return True


def test_it_is_an_instance_of_the_class_with_the_same_dict(pair, device):
    model, f = pair
    assert isinstance(f, Fussy)
    assert type(f).__name__ == "Fussy"
    assert issubclass(type(f), Fussy)
    assert f is not model
    assert f.unwrap() is model
    assert f.__dict__ is model.__dict__
    assert served(f, model, device)


@pytest.mark.parametrize(
    "make",
    [
        lambda device: torch.nn.Linear(WIDTH, WIDTH, device=device),
        mlp,
        lambda device: torch.nn.LayerNorm(WIDTH, device=device),
    ],
)
def test_classes_of_torch_stay_what_they_are(device, make):
    model = make(device)
    f = wrap(model)
    assert isinstance(f, type(model))
    assert type(f).__name__ == type(model).__name__
    assert f.__dict__ is model.__dict__
    assert served(f, model, device)


def test_wrapping_and_calling_adds_nothing_to_the_module(pair, device):
    model, f = pair
    names = set(vars(model))
    f(randn(3, WIDTH, device=device))
    f.train().eval()
    assert set(vars(model)) == names
    assert type(model) is Fussy


def test_methods_run_with_the_wrapper_as_self(pair):
    model, f = pair
    assert f.me() is f
    assert model.me() is model
    assert f.train() is f
    assert f.eval() is f
    assert f.float() is f
    assert f.requires_grad_(False) is f


def test_an_overridden_train_is_the_one_that_runs(pair, device):
    model, f = pair
    f.train()
    assert model.training
    assert model.blocks[0].training
    assert not model.norm.training
    parent = torch.nn.Sequential(f)
    parent.eval()
    parent.train()
    assert not model.norm.training
    parent.eval()
    assert served(f, model, device)


def test_an_overridden_state_dict_is_the_one_that_runs(pair):
    model, f = pair
    assert list(f.state_dict()) == list(model.state_dict())
    assert "signed" in f.state_dict()
    assert f.state_dict()["saved_by"].tolist() == [2]
    assert "0.saved_by" in torch.nn.Sequential(f).state_dict()
    assert list(torch.nn.Sequential(f).state_dict()) == list(torch.nn.Sequential(model).state_dict())


def test_extra_state_is_saved_and_loaded_through_the_wrapper_and_through_a_parent(pair, device):
    model, f = pair
    model.trained_steps = 7
    assert f.state_dict()["_extra_state"] == {"trained_steps": 7}
    assert torch.nn.Sequential(f).state_dict()["0._extra_state"] == {"trained_steps": 7}
    other = Fussy(2, device).eval()
    g = wrap(other)
    g.load_state_dict(f.state_dict())
    assert (other.trained_steps, g.trained_steps) == (7, 7)
    model.trained_steps = 9
    torch.nn.Sequential(g).load_state_dict(torch.nn.Sequential(f).state_dict())
    assert (other.trained_steps, g.trained_steps) == (9, 9)
    assert same([*other.blocks.parameters()], [*model.blocks.parameters()])


def test_overridden_parameters_are_the_ones_that_are_listed(pair):
    model, f = pair
    wanted = [id(parameter) for parameter in model.blocks[1].parameters()]
    assert [id(parameter) for parameter in f.parameters()] == wanted
    f.requires_grad_(False)
    assert [parameter.requires_grad for parameter in model.blocks.parameters()] == [True, True, False, False]


def test_container_methods_of_the_class_work_on_the_wrapper(pair, device):
    model, f = pair
    assert len(f) == 2
    assert f[1] is model.blocks[1]
    assert model.blocks[0] in f
    new = torch.nn.Linear(WIDTH, WIDTH, device=device)
    f[0] = new
    assert model.blocks[0] is new
    assert served(f, model, device)


def test_a_sequential_may_be_written_through_the_wrapper(device):
    model = mlp(device)
    f = wrap(model)
    f[1] = torch.nn.ReLU()
    assert type(model[1]) is torch.nn.ReLU
    f.append(torch.nn.Tanh())
    assert len(model) == 4
    del f[3]
    assert len(model) == 3
    assert served(f, model, device)


def test_properties_class_methods_and_private_names_work_on_the_wrapper(pair):
    model, f = pair
    assert (f.secret, f.named(), f.answer(), f.kind) == ("mine", "fussy", 42, "fussy")
    f.secret = "changed"
    assert model.secret == "changed"
    assert "of 2" in repr(f)


class Delegating(torch.nn.Module):
    """A class that looks missing attributes up elsewhere, as adapters do."""

    def __init__(self, base):
        super().__init__()
        self.base = base

    def __getattr__(self, name):
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.base, name)

    def forward(self, x):
        return self.base(x) * 2


def test_a_class_with_its_own_lookup_keeps_it(device):
    model = Delegating(mlp(device)).eval()
    model.base.note = "from the base"
    f = wrap(model)
    assert f.note == "from the base"
    with pytest.raises(AttributeError, match="nope"):
        f.nope  # noqa: B018
    assert served(f, model, device)


def test_two_wrappers_of_one_module_do_not_know_each_other(device):
    model = mlp(device)
    f, g = wrap(model), wrap(model, [4])
    x = randn(3, WIDTH, device=device)
    f(x)
    f(x)
    g(x)
    assert (f.report().replays, g.report().replays) == (2, 1)
    assert (len(f.report().graphs), len(g.report().graphs)) == (2, 1)
    assert f.unwrap() is g.unwrap() is model


def test_its_place_inside_a_parent_is_the_modules(pair, device):
    model, f = pair
    parent, plain = torch.nn.ModuleDict({"body": f}), torch.nn.ModuleDict({"body": model})
    for names in ("named_parameters", "named_buffers"):
        assert [(k, id(v)) for k, v in getattr(parent, names)()] == [
            (k, id(v)) for k, v in getattr(plain, names)()
        ]
    assert [name for name, _ in parent.named_modules()] == [name for name, _ in plain.named_modules()]
    assert parent["body"] is f
    seen = []
    parent.apply(lambda module: seen.append(type(module).__name__))
    assert "Fussy" in seen
    assert served(parent["body"], model, device)


def test_hooks_registered_through_the_wrapper_are_the_modules(device):
    model = mlp(device)
    f = wrap(model, [4])
    handles = [
        f.register_forward_hook(lambda module, args, out: out * 2),
        f.register_forward_pre_hook(lambda module, args: (args[0] + 1,)),
    ]
    x = randn(4, WIDTH, device=device)
    with torch.no_grad():
        wanted = model(x)
        assert same(wanted, model.forward(x + 1) * 2)
    for _ in range(2):
        assert same(f(x), wanted)
    assert f.report().replays == 2
    for handle in handles:
        handle.remove()
    f.recapture()
    with torch.no_grad():
        assert same(f(x), model.forward(x))


def test_hooks_for_saving_and_loading_act_through_the_wrapper(device):
    model = mlp(device)
    f = wrap(model)
    f.register_state_dict_post_hook(lambda module, state, prefix, meta: state.update({prefix + "hook": 1}))
    assert f.state_dict()["hook"] == model.state_dict()["hook"] == 1
    loaded = []
    f.register_load_state_dict_post_hook(
        lambda module, keys: loaded.append(keys.unexpected_keys.remove("hook"))
    )
    f.load_state_dict(model.state_dict())
    model.load_state_dict(f.state_dict())
    assert len(loaded) == 2


def test_a_wrapper_of_a_wrapper_is_a_module_of_the_class_too(pair, device):
    model, inner = pair
    outer = wrap(inner)
    assert isinstance(outer, Fussy)
    assert type(outer).__name__ == "Fussy"
    assert outer.unwrap() is inner
    assert outer.__dict__ is model.__dict__
    assert outer.me() is outer
    assert len(outer) == 2
    assert list(outer.state_dict()) == list(model.state_dict())
    outer.train()
    assert model.training
    assert not model.norm.training
    outer.eval()
    assert served(outer, model, device)
    assert reasons(outer) == {}
    assert served(inner, model, device)


def test_a_wrapped_module_inside_a_wrapped_module_is_part_of_its_graph(device):
    body = mlp(device)
    inner = wrap(body)
    model = torch.nn.Sequential(inner, torch.nn.Tanh()).eval()
    outer = wrap(model)
    x = randn(3, WIDTH, device=device)
    with torch.no_grad():
        wanted = body(padded(x, 4))[:3].tanh()
    for _ in range(2):
        assert same(outer(x), wanted)
    assert outer.report().replays == 2
    assert outer[0] is inner
    assert isinstance(outer[0], torch.nn.Sequential)


def test_an_optimizer_made_from_the_wrapper_changes_what_graphs_read(device):
    model = mlp(device)
    f = wrap(model)
    x = randn(3, WIDTH, device=device)
    f(x)
    optimizer = torch.optim.SGD(f.parameters(), lr=0.1)
    f.unwrap()(x).square().sum().backward()
    optimizer.step()
    assert served(f, model, device)


class Registry(type):
    """Keeps a list of all classes, each name once."""

    known = []

    def __new__(cls, name, bases, place, *, version):
        assert name not in cls.known
        cls.known.append(name)
        return super().__new__(cls, name, bases, place)

    def __init__(cls, name, bases, place, *, version):
        super().__init__(name, bases, place)


class Registered(torch.nn.Linear, metaclass=Registry, version=1):
    pass


class Abstract(torch.nn.Linear, abc.ABC):
    pass


class MadeFromArguments(torch.nn.Linear):
    def __new__(cls, width, device):
        assert width == WIDTH
        return super().__new__(cls)

    def __init__(self, width, device):
        super().__init__(width, width, device=device)


class Slotted(torch.nn.Linear):
    __slots__ = ("__scale", "shift")

    def __init__(self, device):
        self.__scale, self.shift = 3.0, 1.0
        super().__init__(WIDTH, WIDTH, device=device)

    def forward(self, x):
        return super().forward(x) * self.__scale + self.shift


def exported(device):
    rows = torch.export.Dim("rows", min=2, max=64)
    model, x = mlp(device), randn(5, WIDTH, device=device)
    return torch.export.export(model, (x,), dynamic_shapes=({0: rows},)).module()


OF_OTHER_CLASSES = {
    "fx": lambda device: torch.fx.symbolic_trace(mlp(device)),
    "export": exported,
    "own __new__": lambda device: MadeFromArguments(WIDTH, device),
    "metaclass": lambda device: Registered(WIDTH, WIDTH, device=device),
    "abstract": lambda device: Abstract(WIDTH, WIDTH, device=device),
    "slots": Slotted,
    "weight norm": lambda device: torch.nn.utils.parametrizations.weight_norm(
        torch.nn.Linear(WIDTH, WIDTH, device=device)
    ),
    "script": lambda device: torch.jit.script(mlp(device)),
    "traced": lambda device: torch.jit.trace(mlp(device), randn(3, WIDTH, device=device)),
    "frozen script": lambda device: torch.jit.freeze(torch.jit.script(mlp(device))),
    "data parallel": lambda device: torch.nn.DataParallel(mlp(device)),
}


@pytest.mark.filterwarnings("ignore:.*(torch.jit|LeafSpec):")
@pytest.mark.parametrize("kind", OF_OTHER_CLASSES)
def test_classes_that_are_made_in_ways_of_their_own_are_wrapped(device, kind):
    model = OF_OTHER_CLASSES[kind](device)
    f = wrap(model)
    assert isinstance(f, type(model))
    x = randn(3, WIDTH, device=device)
    for _ in range(2):
        with torch.no_grad():
            assert torch.allclose(f(x), model(x), atol=1e-5)
    assert torch.allclose(f(x), model(x), atol=1e-5)  # where gradients are enabled
    assert (reasons(f), f.report().replays) == ({}, 3)
    if kind not in (
        "own __new__",
        "slots",
        "frozen script",
    ):  # the others cannot be copied without a wrapper either
        twin = copy.deepcopy(f)
        assert isinstance(twin.unwrap(), torch.nn.Module)
        assert type(twin.unwrap()) is not type(twin)
        with torch.no_grad():
            before = model(x)
            for parameter in model.parameters():
                parameter.mul_(2)
            assert torch.allclose(twin(x), before, atol=1e-5)
            assert torch.allclose(f(x), model(x), atol=1e-5)
            assert not torch.allclose(f(x), before, atol=1e-2)
    if kind == "slots":
        assert f.shift == 1.0
        f.shift = 2.0
        assert model.shift == 2.0
        with torch.no_grad():
            assert torch.allclose(f(x), model(x), atol=1e-5)
            g = wrap(model)
            g(x)
            model._Slotted__scale = 5.0
            assert torch.allclose(g(x), model(x), atol=1e-5)
        assert reasons(g) == {"attribute-changed": 1}


class Holding(torch.nn.Linear, dict):
    pass


def test_a_module_that_is_a_container_of_python_too_is_refused_by_name(device):
    model = Holding(WIDTH, WIDTH, device=device)
    with pytest.raises(ConfigError, match=r"cannot wrap a Holding.*graphed\(module.forward\)"):
        wrap(model)
    x = randn(3, WIDTH, device=device)
    with torch.no_grad():
        assert torch.allclose(wrap(model.forward)(x), model(x), atol=1e-5)
