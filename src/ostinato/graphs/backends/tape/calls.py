"""The cheapest way to make an ATen call again from Python.

A generated binding (`torch.mul`, `Tensor.copy_`) parses its arguments in C++ and costs 2 us where the same
`OpOverload` costs 6 to 7. Which overload a binding comes to depends on its arguments, so every call is tried
once, stopped before it runs: a binding is taken if it comes to the wanted overload with the same arguments.
That depends on the kinds of the tensors and the values of all else, so it is tried once for each of these.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import Any, NamedTuple, NoReturn

import torch

from ...dispatch_mode import DispatchMode

_BINDINGS: tuple[Any, ...] = (torch._C._VariableFunctions, torch._C._nn, torch._C.TensorBase)
_SCALAR_OPERATORS = {"add", "sub", "mul", "div", "eq", "ne", "lt", "le", "gt", "ge"}
# Out-variants that write beyond what they are given, or only part of it, where results lie in one slab. That
# of batch norm takes statistics of a transposed input from what it is to write.
_BROKEN_OUT_VARIANTS = {
    *("linalg_qr", "binary_cross_entropy", "huber_loss", "mse_loss", "smooth_l1_loss", "soft_margin_loss"),
    "native_batch_norm",
}
# An out-variant takes these from the tensor it writes to.
_FACTORY_ARGUMENTS = ("dtype", "layout", "device", "pin_memory")


@contextmanager
def calling_again() -> Iterator[None]:
    """The state to make recorded calls in. What the caller has switched on (autocast, modes on functions)
    was part of the recording if it was on then, and must not act a second time."""
    autocast = torch.is_autocast_enabled("cpu")
    torch.set_autocast_enabled("cpu", False)
    try:
        with torch.no_grad(), torch._C._AutoDispatchBelowAutograd(), torch._C.DisableTorchFunction():
            yield
    finally:
        torch.set_autocast_enabled("cpu", autocast)


def fast_call(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], given: dict[str, Any] | None = None
) -> Callable[[], Any] | None:
    """A call through a binding that comes to `func(*args, **kwargs)`, if there is one.

    `given`: the keyword arguments as bindings name them, where that is different.
    """
    given = kwargs if given is None else given
    for home in _BINDINGS:
        binding = getattr(home, func._opname, None)
        if binding is not None and _comes_to(binding, args, given, (func, args, kwargs)):
            return partial(binding, *_with_scalar_tensor(func, args), **given)
    return None


def call_into(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], places: tuple[torch.Tensor, ...]
) -> Callable[[], Any] | None:
    """A call that writes its results into given tensors; None if there is none or another way is cheaper."""
    variant = find_out_variant(func)
    if variant is None:
        return None
    rest = {name: value for name, value in kwargs.items() if name not in variant.dropped}
    named = rest | dict(zip(variant.outs, places, strict=True))
    fast = fast_call(variant.func, args, named, rest | {"out": places if len(places) > 1 else places[0]})
    if fast is None and fast_call(func, args, kwargs) is None:
        return partial(variant.func._op, *args, **named)
    return fast  # or the binding without out=, and a copy


class _Stopped(Exception):
    """Carries an ATen call that was not made."""


class _Stop(DispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:
        raise _Stopped(func, args, kwargs or {})


_MOST_TRIALS = 1 << 14
_trials: dict[Any, bool] = {}
"""Whether a binding comes to an overload, by `_form` of the calls."""


def _comes_to(binding: Any, args: tuple[Any, ...], kwargs: dict[str, Any], wanted: tuple[Any, ...]) -> bool:
    func, _, named = wanted
    try:
        key = (binding, func, _form((args, kwargs, named), []))
    except _Unknown:
        return _try(binding, args, kwargs, wanted)
    if key not in _trials:
        if len(_trials) >= _MOST_TRIALS:
            _trials.clear()
        _trials[key] = _try(binding, args, kwargs, wanted)
    return _trials[key]


class _Unknown(Exception):
    """An argument of a kind that nothing is kept for."""


_SEQUENCES = (list, tuple)
_PLAIN = (bool, int, float, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)


def _form(value: Any, seen: list[torch.Tensor]) -> Any:
    """Arguments with tensors replaced by their kind, and by which of those seen before they are."""
    if isinstance(value, torch.Tensor):
        place = next((at for at, other in enumerate(seen) if other is value), len(seen))
        if place == len(seen):
            seen.append(value)
        return type(value), value.dtype, value.dim() == 0, value.is_conj(), place
    if isinstance(value, _SEQUENCES):
        return type(value), tuple([_form(item, seen) for item in value])
    if isinstance(value, dict):
        return dict, tuple([(name, _form(item, seen)) for name, item in value.items()])
    if not isinstance(value, _PLAIN):
        raise _Unknown
    return type(value), value


def _try(binding: Any, args: tuple[Any, ...], kwargs: dict[str, Any], wanted: tuple[Any, ...]) -> bool:
    try:
        with _Stop():
            binding(*args, **kwargs)
    except _Stopped as stopped:
        return _is_same(stopped.args, wanted)
    except Exception:  # it does not take such arguments
        return False
    return False


def _is_same(one: Any, other: Any) -> bool:
    """Equal arguments; tensors only if they are one."""
    if one is other:
        return True
    if type(one) is not type(other) or isinstance(one, torch.Tensor):
        return False
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(_is_same, one, other))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_is_same(one[name], other[name]) for name in one)
    return bool(one == other)


def _with_scalar_tensor(func: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Replace a Python number by a tensor of the other operand's type, which is 3 times cheaper.

    Only where torch would convert the number to that very type before computing, so that not a bit
    changes: an operand of a type that computes in itself, and a number of the same category.
    """
    if func._opname.removesuffix("_") not in _SCALAR_OPERATORS or len(args) != 2:
        return args
    operand, number = args
    if not isinstance(operand, torch.Tensor) or operand.is_conj():
        return args
    floating = operand.dtype in (torch.float32, torch.float64)
    if (floating and type(number) in (int, float)) or (operand.dtype is torch.int64 and type(number) is int):
        return operand, torch.tensor(number, dtype=operand.dtype, device="cpu")
    return args


class OutVariant(NamedTuple):
    """An overload, the names of its out arguments, and the arguments to leave away when calling it."""

    func: Any
    outs: tuple[str, ...]
    dropped: tuple[str, ...]


@cache
def find_out_variant(func: Any) -> OutVariant | None:
    """The overload that writes its results into given tensors and has the same other arguments, or None."""
    returns = [str(returned.type) for returned in func._schema.returns]
    if not returns or any(kind != "Tensor" for kind in returns) or func._opname in _BROKEN_OUT_VARIANTS:
        return None
    wanted = [(argument.name, str(argument.type)) for argument in func._schema.arguments]
    packet = func.overloadpacket
    for name in packet.overloads():
        candidate = getattr(packet, name)
        outs = [argument for argument in candidate._schema.arguments if argument.is_out]
        if len(outs) != len(returns) or any(str(argument.type) != "Tensor" for argument in outs):
            continue
        rest = [(a.name, str(a.type)) for a in candidate._schema.arguments if not a.is_out]
        names = {name for name, _ in rest}
        dropped = tuple(n for n, _ in wanted if n in _FACTORY_ARGUMENTS and n not in names)
        if rest == [pair for pair in wanted if pair[0] not in dropped]:
            return OutVariant(candidate, tuple(argument.name for argument in outs), dropped)
    return None
