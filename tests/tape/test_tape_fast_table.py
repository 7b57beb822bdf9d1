"""Calls that every model makes go through a binding, and mean the same as the ATen overload."""

import pytest
import torch
from tape_recording import record, same

from ostinato.graphs.backends.tape.calls import _BINDINGS, fast_call, find_out_variant

aten = torch.ops.aten

FUNCTIONAL_NAMES = """
mm.default addmm.default bmm.default baddbmm.default addmv.default mv.default dot.default
add.Tensor sub.Tensor
mul.Tensor div.Tensor div.Tensor_mode
floor_divide.default remainder.Tensor remainder.Scalar fmod.Tensor fmod.Scalar
pow.Tensor_Scalar pow.Tensor_Tensor pow.Scalar addcmul.default addcdiv.default lerp.Scalar lerp.Tensor
maximum.default minimum.default clamp.default clamp.Tensor clamp_min.default clamp_max.default
eq.Tensor eq.Scalar ne.Tensor ne.Scalar lt.Tensor lt.Scalar le.Tensor le.Scalar gt.Tensor gt.Scalar
ge.Tensor ge.Scalar logical_and.default logical_or.default logical_not.default logical_xor.default
bitwise_and.Tensor bitwise_and.Scalar bitwise_or.Tensor bitwise_or.Scalar bitwise_xor.Tensor
bitwise_not.default bitwise_left_shift.Tensor_Scalar bitwise_right_shift.Tensor_Scalar
neg.default abs.default sign.default exp.default exp2.default expm1.default log.default log2.default
log1p.default sqrt.default rsqrt.default reciprocal.default sin.default cos.default
tanh.default sigmoid.default erf.default floor.default ceil.default round.default trunc.default
isposinf.default isneginf.default
sum.dim_IntList mean.dim mean.default prod.dim_int amax.default amin.default
all.dim any.dim all.default any.default argmax.default argmin.default
cumsum.default cumprod.default logsumexp.default _softmax.default _log_softmax.default
cat.default stack.default index_select.default gather.default where.self
scatter.src scatter.value scatter_add.default index_copy.default index_add.default
tril.default triu.default arange.default arange.start_step
rand.default randn.default randint.default randint.low randperm.default
multinomial.default bernoulli.default
topk.default sort.default sort.stable max.dim min.dim cummax.default kthvalue.default
silu.default gelu.default softplus.default leaky_relu.default elu.default hardtanh.default hardswish.default
hardsigmoid.default glu.default linear.default
sum.default relu.default embedding.default
native_layer_norm.default native_group_norm.default native_batch_norm.default
masked_fill.Scalar masked_fill.Tensor constant_pad_nd.default
convolution.default var_mean.correction std_mean.correction native_dropout.default
_scaled_dot_product_flash_attention_for_cpu.default _fused_rms_norm.default roll.default flip.default
isnan.default isinf.default
"""
IN_PLACE_NAMES = """
copy_.default zero_.default fill_.Scalar fill_.Tensor
add_.Tensor sub_.Tensor mul_.Tensor div_.Tensor
pow_.Scalar neg_.default exp_.default sqrt_.default rsqrt_.default reciprocal_.default sigmoid_.default
tanh_.default relu_.default abs_.default clamp_.default clamp_min_.default clamp_max_.default
lerp_.Scalar lerp_.Tensor addcmul_.default addcdiv_.default addmm_.default baddbmm_.default
masked_fill_.Scalar masked_fill_.Tensor index_copy_.default index_add_.default index_fill_.int_Scalar
index_put_.default scatter_.src scatter_.value scatter_add_.default
logical_and_.default logical_or_.default logical_not_.default eq_.Scalar bitwise_and_.Tensor
bitwise_or_.Tensor tril_.default triu_.default
uniform_.default normal_.default bernoulli_.float bernoulli_.Tensor exponential_.default random_.default
random_.from random_.to cauchy_.default geometric_.default log_normal_.default
silu_.default gelu_.default leaky_relu_.default elu_.default hardtanh_.default
_foreach_add_.List _foreach_add_.Scalar _foreach_mul_.List _foreach_mul_.Scalar _foreach_mul_.Tensor
_foreach_sub_.List _foreach_div_.List _foreach_copy_.default _foreach_zero_.default _foreach_sqrt_.default
_foreach_lerp_.Scalar _foreach_addcmul_.Scalar _foreach_addcdiv_.Scalar
_fused_adam_.default _fused_adam_.tensor_lr _fused_adamw_.default _fused_adamw_.tensor_lr
_fused_sgd_.default _fused_sgd_.tensor_lr
"""
FUNCTIONAL, IN_PLACE = FUNCTIONAL_NAMES.split(), IN_PLACE_NAMES.split()


def overload(name):
    packet, kind = name.split(".")
    return getattr(getattr(aten, packet), kind)


def f(*size):
    return torch.randn(*size)


def i(*values):
    return torch.tensor(values)


def b(*size):
    return torch.randn(*size) > 0


# Arguments by overload: positional, then keyword ones. Where a family shares its arguments, by pattern below.
ARGUMENTS = {
    "mm.default": lambda: (f(3, 4), f(4, 5)),
    "addmm.default": lambda: ((f(5), f(3, 4), f(4, 5)), {"beta": 2, "alpha": 0.5}),
    "bmm.default": lambda: (f(2, 3, 4), f(2, 4, 5)),
    "baddbmm.default": lambda: ((f(2, 3, 5), f(2, 3, 4), f(2, 4, 5)), {"beta": 0.5, "alpha": 2}),
    "addmv.default": lambda: (f(3), f(3, 4), f(4)),
    "mv.default": lambda: (f(3, 4), f(4)),
    "dot.default": lambda: (f(4), f(4)),
    "linear.default": lambda: (f(3, 4), f(5, 4), f(5)),
    "add.Tensor": lambda: ((f(3, 4), f(4)), {"alpha": 3}),
    "sub.Tensor": lambda: ((f(3, 4), f(4)), {"alpha": 3}),
    "div.Tensor_mode": lambda: ((f(3, 4), f(4)), {"rounding_mode": "floor"}),
    "div.Scalar_mode": lambda: ((f(3, 4), 0.5), {"rounding_mode": "trunc"}),
    "pow.Tensor_Scalar": lambda: (f(3, 4), 2),
    "pow.Tensor_Tensor": lambda: (f(3, 4).abs(), f(3, 4)),
    "pow.Scalar": lambda: (2.0, f(3, 4)),
    "addcmul.default": lambda: ((f(3), f(3), f(3)), {"value": 2}),
    "addcdiv.default": lambda: ((f(3), f(3), f(3)), {"value": 2}),
    "lerp.Scalar": lambda: (f(3), f(3), 0.3),
    "lerp.Tensor": lambda: (f(3), f(3), f(3)),
    "clamp.default": lambda: (f(3, 4), -0.5, None),
    "clamp.Tensor": lambda: (f(3, 4), None, f(4)),
    "sum.dim_IntList": lambda: ((f(3, 4), [1], True), {"dtype": torch.float64}),
    "sum.default": lambda: (f(3, 4),),
    "mean.dim": lambda: (f(3, 4), [-1], True),
    "mean.default": lambda: (f(3, 4),),
    "prod.dim_int": lambda: (f(3, 4), 1),
    "amax.default": lambda: (f(3, 4), [1], True),
    "amin.default": lambda: (f(3, 4), [0]),
    "all.dim": lambda: (b(3, 4), 1, True),
    "any.dim": lambda: (b(3, 4), 1),
    "all.default": lambda: (b(3, 4),),
    "any.default": lambda: (b(3, 4),),
    "argmax.default": lambda: (f(3, 4), -1, True),
    "argmin.default": lambda: (f(3, 4),),
    "cumsum.default": lambda: (f(3, 4), 1),
    "cumprod.default": lambda: (f(3, 4), 1),
    "logsumexp.default": lambda: (f(3, 4), [1]),
    "_softmax.default": lambda: (f(3, 4), -1, False),
    "_log_softmax.default": lambda: (f(3, 4), -1, False),
    "cat.default": lambda: ([f(3, 4), f(3, 2)], 1),
    "stack.default": lambda: ([f(3, 4), f(3, 4)], 1),
    "index_select.default": lambda: (f(3, 4), 1, i(0, 3, 3)),
    "gather.default": lambda: (f(3, 4), 1, i(0, 3).expand(3, 2)),
    "where.self": lambda: (b(3, 4), f(3, 4), f(4)),
    "scatter.src": lambda: (f(3, 4), 1, i(0, 3).expand(3, 2), f(3, 2)),
    "scatter.value": lambda: (f(3, 4), 1, i(0, 3).expand(3, 2), 2.0),
    "scatter_add.default": lambda: (f(3, 4), 1, i(0, 3).expand(3, 2), f(3, 2)),
    "index_copy.default": lambda: (f(3, 4), 0, i(2, 0), f(2, 4)),
    "index_add.default": lambda: ((f(3, 4), 0, i(2, 2), f(2, 4)), {"alpha": 2}),
    "tril.default": lambda: (f(3, 4), -1),
    "triu.default": lambda: (f(3, 4), 1),
    "arange.default": lambda: ((5,), {"dtype": torch.float32}),
    "arange.start": lambda: (2, 5),
    "arange.start_step": lambda: ((2, 9, 3), {"dtype": torch.int32}),
    "rand.default": lambda: ([3, 4],),
    "randn.default": lambda: (([5, 4],), {"dtype": torch.float64}),
    "randint.default": lambda: (9, [3, 4]),
    "randint.low": lambda: (3, 9, [3, 4]),
    "randperm.default": lambda: (9,),
    "multinomial.default": lambda: (f(3, 4).softmax(-1), 2, False),
    "bernoulli.default": lambda: (f(3, 4).sigmoid(),),
    "topk.default": lambda: (f(3, 6), 2, -1, False, True),
    "sort.default": lambda: (f(3, 6), 0, True),
    "sort.stable": lambda: ((f(3, 6),), {"stable": True, "dim": 0, "descending": True}),
    "max.dim": lambda: (f(3, 4), 1, True),
    "min.dim": lambda: (f(3, 4), 0),
    "cummax.default": lambda: (f(3, 4), 1),
    "kthvalue.default": lambda: (f(3, 4), 2, 1),
    "gelu.default": lambda: ((f(3, 4),), {"approximate": "tanh"}),
    "softplus.default": lambda: (f(3, 4), 2, 10),
    "leaky_relu.default": lambda: (f(3, 4), 0.2),
    "elu.default": lambda: (f(3, 4), 0.5),
    "hardtanh.default": lambda: (f(3, 4), -0.5, 0.5),
    "glu.default": lambda: (f(3, 4), 1),
    "embedding.default": lambda: (f(5, 4), i(1, 3, 0), -1, False, False),
    "native_layer_norm.default": lambda: (f(3, 4), [4], f(4), None, 1e-5),
    "native_group_norm.default": lambda: (f(2, 4, 3), f(4), f(4), 2, 4, 3, 2, 1e-5),
    "native_batch_norm.default": lambda: (f(5, 3), f(3), f(3), f(3), f(3), True, 0.1, 1e-5),
    "masked_fill.Scalar": lambda: (f(3, 4), b(3, 4), float("-inf")),
    "masked_fill.Tensor": lambda: (f(3, 4), b(3, 4), torch.tensor(2.0)),
    "constant_pad_nd.default": lambda: (f(3, 4), [1, 2], 0.5),
    "convolution.default": lambda: (
        f(1, 2, 5, 5),
        f(3, 2, 3, 3),
        f(3),
        [1, 1],
        [1, 1],
        [1, 1],
        False,
        [0, 0],
        1,
    ),
    "var_mean.correction": lambda: ((f(3, 4), [1]), {"correction": 0, "keepdim": True}),
    "std_mean.correction": lambda: ((f(3, 4), [1]), {"correction": 1}),
    "native_dropout.default": lambda: (f(30, 4), 0.4, True),
    "_scaled_dot_product_flash_attention_for_cpu.default": lambda: (
        (f(1, 2, 3, 8), f(1, 2, 3, 8), f(1, 2, 3, 8), 0.0, True),
        {"scale": 0.3},
    ),
    "_fused_rms_norm.default": lambda: (f(3, 4), [4], f(4), 1e-6),
    "roll.default": lambda: (f(3, 4), [1], [0]),
    "flip.default": lambda: (f(3, 4), [1]),
    "copy_.default": lambda: (f(3, 4), f(4), False),
    "fill_.Scalar": lambda: (f(3), 2.5),
    "fill_.Tensor": lambda: (f(3), torch.tensor(2.5)),
    "pow_.Scalar": lambda: (f(3), 2),
    "clamp_.default": lambda: (f(3), None, 0.5),
    "lerp_.Scalar": lambda: (f(3), f(3), 0.3),
    "lerp_.Tensor": lambda: (f(3), f(3), f(3)),
    "addcmul_.default": lambda: ((f(3), f(3), f(3)), {"value": 2}),
    "addcdiv_.default": lambda: ((f(3), f(3), f(3)), {"value": 2}),
    "addmm_.default": lambda: ((f(3, 5), f(3, 4), f(4, 5)), {"beta": 0.5}),
    "baddbmm_.default": lambda: ((f(2, 3, 5), f(2, 3, 4), f(2, 4, 5)), {"alpha": 0.5}),
    "masked_fill_.Scalar": lambda: (f(3, 4), b(3, 4), 1.5),
    "masked_fill_.Tensor": lambda: (f(3, 4), b(3, 4), torch.tensor(1.5)),
    "index_copy_.default": lambda: (f(3, 4), 0, i(2, 0), f(2, 4)),
    "index_add_.default": lambda: ((f(3, 4), 0, i(2, 2), f(2, 4)), {"alpha": 2}),
    "index_fill_.int_Scalar": lambda: (f(3, 4), 1, i(2, 0), 1.5),
    "index_put_.default": lambda: (f(3, 4), [i(2, 0), i(1, 1)], f(2), True),
    "scatter_.src": lambda: (f(3, 4), 1, i(0, 3).expand(3, 2), f(3, 2)),
    "scatter_.value": lambda: (f(3, 4), 1, i(0, 3).expand(3, 2), 1.5),
    "scatter_add_.default": lambda: (f(3, 4), 1, i(0, 3).expand(3, 2), f(3, 2)),
    "logical_and_.default": lambda: (b(3, 4), b(3, 4)),
    "logical_or_.default": lambda: (b(3, 4), b(3, 4)),
    "logical_not_.default": lambda: (b(3, 4),),
    "eq_.Scalar": lambda: (i(1, 2, 3), 2),
    "tril_.default": lambda: (f(3, 4), -1),
    "triu_.default": lambda: (f(3, 4), 1),
    "uniform_.default": lambda: (f(3, 4), -1, 2),
    "normal_.default": lambda: (f(3, 40), 1, 2),
    "bernoulli_.float": lambda: (f(3, 4), 0.3),
    "bernoulli_.Tensor": lambda: (f(3, 4), f(3, 4).sigmoid()),
    "exponential_.default": lambda: (f(3, 4), 2.0),
    "random_.default": lambda: (f(3, 4),),
    "random_.from": lambda: (f(3, 4), 2, 9),
    "random_.to": lambda: (f(3, 4), 9),
    "cauchy_.default": lambda: (f(3, 4), 1, 2),
    "geometric_.default": lambda: (f(3, 4), 0.3),
    "log_normal_.default": lambda: (f(3, 4), 1, 0.5),
    "leaky_relu_.default": lambda: (f(3, 4), 0.2),
    "elu_.default": lambda: (f(3, 4), 0.5),
    "hardtanh_.default": lambda: (f(3, 4), -0.5, 0.5),
    "gelu_.default": lambda: ((f(3, 4),), {"approximate": "tanh"}),
    "_foreach_add_.List": lambda: (([f(3), f(2)], [f(3), f(2)]), {"alpha": 2}),
    "_foreach_add_.Scalar": lambda: ([f(3), f(2)], 2.0),
    "_foreach_mul_.List": lambda: ([f(3), f(2)], [f(3), f(2)]),
    "_foreach_mul_.Scalar": lambda: ([f(3), f(2)], 2.0),
    "_foreach_mul_.Tensor": lambda: ([f(3), f(2)], torch.tensor(2.0)),
    "_foreach_sub_.List": lambda: (([f(3), f(2)], [f(3), f(2)]), {"alpha": 2}),
    "_foreach_div_.List": lambda: ([f(3), f(2)], [f(3), f(2)]),
    "_foreach_copy_.default": lambda: ([f(3), f(2)], [f(3), f(2)]),
    "_foreach_zero_.default": lambda: ([f(3), f(2)],),
    "_foreach_sqrt_.default": lambda: ([f(3).abs(), f(2).abs()],),
    "_foreach_lerp_.Scalar": lambda: ([f(3), f(2)], [f(3), f(2)], 0.3),
    "_foreach_addcmul_.Scalar": lambda: ([f(3)], [f(3)], [f(3)], 0.3),
    "_foreach_addcdiv_.Scalar": lambda: ([f(3)], [f(3)], [f(3)], 0.3),
}


def adam_arguments(lr):
    state = [[f(3)], [f(3)], [f(3)], [f(3).abs()], [], [torch.tensor(2.0)]]
    options = {"beta1": 0.9, "beta2": 0.99, "weight_decay": 0.1, "eps": 1e-8}
    return tuple(state), {"lr": lr, **options, "amsgrad": False, "maximize": False}


def sgd_arguments(lr):
    options = {"weight_decay": 0.1, "momentum": 0.9, "dampening": 0.0}
    flags = {"nesterov": False, "maximize": False, "is_first_step": False}
    return ([f(3)], [f(3)], [f(3)]), {**options, "lr": lr, **flags}


def arguments_of(name):
    """Sample arguments; a family without an entry is told by its schema."""
    if name in ARGUMENTS:
        found = ARGUMENTS[name]()
    elif name.startswith("_fused_ada"):
        found = adam_arguments(torch.tensor(0.1) if "tensor_lr" in name else 0.1)
    elif name.startswith("_fused_sgd"):
        found = sgd_arguments(torch.tensor(0.1) if "tensor_lr" in name else 0.1)
    else:
        required = [
            a for a in overload(name)._schema.arguments if not a.kwarg_only and a.default_value is None
        ]
        integers = name.startswith(("bitwise", "logical")) or "_bitwise" in name
        make = (lambda: torch.randint(1, 9, (3, 4))) if integers else (lambda: f(3, 4).abs() + 0.1)
        number = 2 if integers else 1.5
        found = tuple(make() if str(a.type) == "Tensor" else number for a in required)
    with_keywords = len(found) == 2 and isinstance(found[0], tuple) and isinstance(found[1], dict)
    return found if with_keywords else (found, {})


def two_runs(name, first, second):
    """Run both on equal arguments from one seed; results and arguments afterwards."""
    outcomes = []
    for run in (first, second):
        torch.manual_seed(5)
        args, kwargs = arguments_of(name)
        torch.manual_seed(6)
        outcomes.append((run(args, kwargs), args, kwargs, torch.get_rng_state()))
    return outcomes


def places_like(result):
    return [torch.full_like(leaf, 1) for leaf in ([result] if isinstance(result, torch.Tensor) else result)]


def arguments_again(name):
    state = torch.get_rng_state()
    torch.manual_seed(5)
    found = arguments_of(name)
    torch.set_rng_state(state)
    return found


@pytest.mark.parametrize("name", [n for n in FUNCTIONAL if find_out_variant(overload(n)) is not None])
def test_out_variants_found_by_schema(name):
    def through_variant(args, kwargs):
        results = overload(name)(*args, **kwargs)
        torch.manual_seed(6)
        places = places_like(results)
        args, kwargs = arguments_again(name)
        variant = find_out_variant(overload(name))
        kwargs = {k: v for k, v in kwargs.items() if k not in variant.dropped}
        variant.func(*args, **kwargs, **dict(zip(variant.outs, places, strict=True)))
        return places

    got, expected = two_runs(name, through_variant, lambda args, kwargs: overload(name)(*args, **kwargs))
    assert same(list(got[0]), [expected[0]] if isinstance(expected[0], torch.Tensor) else list(expected[0]))


@pytest.mark.parametrize("name", [*FUNCTIONAL, *IN_PLACE])
def test_a_tape_takes_the_fast_way_and_agrees(name):
    torch.manual_seed(5)
    args, kwargs = arguments_of(name)
    recorded = record(lambda: overload(name)(*args, **kwargs))
    eager_args, eager_kwargs = arguments_again(name)
    torch.manual_seed(6)
    expected = overload(name)(*eager_args, **eager_kwargs)
    torch.manual_seed(6)
    assert same(recorded.replay(), expected)
    assert same((args, kwargs), (eager_args, eager_kwargs))
    if overload(name).has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd):
        return  # arrives whole only below autograd
    call = recorded.tape.segments[0]._calls[0]
    run = call.args[0] if call.func.__name__.startswith("_run_and_copy") else call
    assert run.func in [getattr(home, overload(name)._opname, None) for home in _BINDINGS]


def test_a_binding_that_comes_to_something_else_is_not_taken():
    x = f(3)
    assert fast_call(aten.mul.Scalar, (x, 2.0), {}) is None, "torch.mul comes to mul.Tensor"
    assert fast_call(aten.index_put_.default, (f(3, 4), [None, i(1)], f(1)), {}) is None
    assert fast_call(torch.ops.prims.mul.default, (x, x), {}) is None
    before = torch.get_rng_state()
    assert fast_call(aten.normal_.default, (x, 1.0, 2.0), {}) is not None
    assert torch.equal(torch.get_rng_state(), before), "trying out must not run anything"


def test_an_overload_with_other_arguments_is_not_taken_for_an_out_variant():
    assert find_out_variant(aten.split.Tensor) is None
    assert find_out_variant(aten.mm.default).func is aten.mm.out
    assert find_out_variant(aten.topk.default).outs == ("values", "indices")
    assert find_out_variant(aten.add.Tensor).func is aten.add.out
