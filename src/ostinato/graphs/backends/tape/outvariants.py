"""The overload of an op that writes its results into given tensors, found by comparing schemas."""

from functools import cache
from typing import Any, NamedTuple

# An out-variant takes these from the tensor it writes to.
FACTORY_ARGUMENTS = ("dtype", "layout", "device", "pin_memory")


class OutVariant(NamedTuple):
    """An overload, the names of its out arguments, and the arguments to leave away when calling it."""

    func: Any
    outs: tuple[str, ...]
    dropped: tuple[str, ...]


@cache
def find_out_variant(func: Any) -> OutVariant | None:
    """The out-variant with the same other arguments, or None."""
    returns = [str(returned.type) for returned in func._schema.returns]
    if not returns or any(kind != "Tensor" for kind in returns):
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
        dropped = tuple(n for n, _ in wanted if n in FACTORY_ARGUMENTS and n not in names)
        if rest == [pair for pair in wanted if pair[0] not in dropped]:
            return OutVariant(candidate, tuple(argument.name for argument in outs), dropped)
    return None
