"""The cheap way to make an ATen call from Python.

A generated binding (`torch.mul`, `Tensor.copy_`) parses its arguments in C++ and costs 2 us where the same
`OpOverload` costs 6 to 7. The tables name, by overload, the bindings that accept the overload's recorded
arguments with the same meaning; whatever is not listed goes through the overload.
"""

from collections.abc import Callable
from typing import Any

import torch

_nn = torch._C._nn

_OUT_NAMES = """
mm.default addmm.default bmm.default baddbmm.default addmv.default mv.default dot.default
add.Tensor sub.Tensor
mul.Tensor mul.Scalar div.Tensor div.Scalar div.Tensor_mode div.Scalar_mode
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
tril.default triu.default arange.default arange.start arange.start_step
rand.default randn.default randint.default randint.low randperm.default
multinomial.default bernoulli.default
topk.default sort.default sort.stable max.dim min.dim cummax.default kthvalue.default
"""

_NN_OUT_NAMES = """
silu.default gelu.default softplus.default leaky_relu.default elu.default hardtanh.default hardswish.default
hardsigmoid.default glu.default linear.default
"""

_PLAIN_NAMES = """
sum.default relu.default embedding.default
native_layer_norm.default native_group_norm.default native_batch_norm.default
masked_fill.Scalar masked_fill.Tensor constant_pad_nd.default
convolution.default var_mean.correction std_mean.correction native_dropout.default
_scaled_dot_product_flash_attention_for_cpu.default _fused_rms_norm.default roll.default flip.default
isnan.default isinf.default
"""

_METHOD_NAMES = """
copy_.default zero_.default fill_.Scalar fill_.Tensor
add_.Tensor sub_.Tensor mul_.Tensor mul_.Scalar div_.Tensor div_.Scalar
pow_.Scalar neg_.default exp_.default sqrt_.default rsqrt_.default reciprocal_.default sigmoid_.default
tanh_.default relu_.default abs_.default clamp_.default clamp_min_.default clamp_max_.default
lerp_.Scalar lerp_.Tensor addcmul_.default addcdiv_.default addmm_.default baddbmm_.default
masked_fill_.Scalar masked_fill_.Tensor index_copy_.default index_add_.default index_fill_.int_Scalar
index_put_.default scatter_.src scatter_.value scatter_add_.default
logical_and_.default logical_or_.default logical_not_.default eq_.Scalar bitwise_and_.Tensor
bitwise_or_.Tensor tril_.default triu_.default
uniform_.default normal_.default bernoulli_.float bernoulli_.Tensor exponential_.default random_.default
random_.from random_.to cauchy_.default geometric_.default log_normal_.default
"""

_NN_IN_PLACE_NAMES = "silu_.default gelu_.default leaky_relu_.default elu_.default hardtanh_.default"

_LIST_NAMES = """
_foreach_add_.List _foreach_add_.Scalar _foreach_mul_.List _foreach_mul_.Scalar _foreach_mul_.Tensor
_foreach_sub_.List _foreach_div_.List _foreach_copy_.default _foreach_zero_.default _foreach_sqrt_.default
_foreach_lerp_.Scalar _foreach_addcmul_.Scalar _foreach_addcdiv_.Scalar
_fused_adam_.default _fused_adam_.tensor_lr _fused_adamw_.default _fused_adamw_.tensor_lr
_fused_sgd_.default _fused_sgd_.tensor_lr
"""


def _table(source: Any, names: str) -> dict[str, Callable[..., Any]]:
    """Bindings by overload; one that this version of torch does not have is left to its overload."""
    found = {name: getattr(source, name.split(".")[0], None) for name in names.split()}
    return {name: function for name, function in found.items() if function is not None}


OUT: dict[str, Callable[..., Any]] = {**_table(torch, _OUT_NAMES), **_table(_nn, _NN_OUT_NAMES)}
"""Functional overloads whose binding takes `out=` (a tuple when there are several results)."""

PLAIN: dict[str, Callable[..., Any]] = _table(torch, _PLAIN_NAMES)
"""Functional overloads whose binding has no `out=`, or a slow one; the result is copied into place."""

IN_PLACE: dict[str, Callable[..., Any]] = {
    **_table(torch.Tensor, _METHOD_NAMES),
    **_table(_nn, _NN_IN_PLACE_NAMES),
    **_table(torch, _LIST_NAMES),
}
"""Overloads that write to their arguments."""


def lookup(
    table: dict[str, Callable[..., Any]], func: Any, args: tuple[Any, ...]
) -> Callable[..., Any] | None:
    """The binding of an overload, if it is an ATen one, listed, and takes these arguments."""
    if func.namespace != "aten" or (func.__name__ == "index_put_.default" and None in args[1]):
        return None
    return table.get(func.__name__)
