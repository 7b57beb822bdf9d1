"""Pickles from another process, read as plain descriptions: nothing that they name is imported or called.

Note [Descriptions]
A pickle is a program, and it can misuse even harmless functions: call them with any arguments, or set
attributes on them. So it gets none. Each allowed name stands for itself (`Name`), calling one records the
call (`Call`), and the two classes whose instances occur keep their state uninterpreted (`Described`). To get
a tensor, `foreign_tensors` reads these records and checks everything in them. The opcodes are checked first:
some of them can exhaust memory with a single number.
"""

from __future__ import annotations

import base64
import binascii
import io
import pickle
import pickletools
from typing import Any, NamedTuple

from .errors import TransferError


class Name(NamedTuple):
    """A name in a pickle."""

    module: str
    name: str

    def __call__(self, *arguments: Any) -> Call:
        return Call(self, arguments)


class Call(NamedTuple):
    """A call that a pickle asks for, with its arguments."""

    function: Name
    arguments: tuple[Any, ...]


class Described:
    """An object of another process, as its fields."""

    __slots__ = ("fields",)
    fields: dict[str, Any]

    def __setstate__(self, state: object) -> None:
        if not isinstance(state, dict):
            raise TransferError("an object's state must be a dict of its fields")
        self.fields = state


class BucketEntry(Described):
    """SGLang's `FlattenedTensorMetadata`: where in a bucket a tensor is."""

    __slots__ = ()


class SharedDescriptor(Described):
    """A file descriptor that another process hands out."""

    __slots__ = ()


REDUCTIONS = "torch.multiprocessing.reductions"
DTYPES = (
    *("float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"),
    *("int64", "int32", "int16", "int8", "uint8", "bool"),
)
_FUNCTIONS_AND_TYPES = (
    Name(REDUCTIONS, "rebuild_tensor"),
    Name(REDUCTIONS, "rebuild_cuda_tensor"),
    Name(REDUCTIONS, "rebuild_typed_storage"),
    Name(REDUCTIONS, "rebuild_storage_fd"),
    Name(REDUCTIONS, "rebuild_storage_filename"),
    Name(REDUCTIONS, "rebuild_storage_empty"),
    Name("sglang.srt.utils.patch_torch", "_rebuild_cuda_tensor_modified"),
    Name("torch._utils", "_rebuild_tensor_v2"),
    Name("torch._utils", "_rebuild_parameter"),
    Name("torch.storage", "_load_from_bytes"),
    Name("torch.storage", "UntypedStorage"),
    Name("torch.storage", "TypedStorage"),
    Name("torch.nn.parameter", "Parameter"),
    Name("torch", "Tensor"),
    Name("torch", "Size"),
    Name("torch", "device"),
    Name("collections", "OrderedDict"),
    *(Name("torch", dtype) for dtype in DTYPES),
)
ALLOWED: dict[tuple[str, str], Any] = {
    **{(each.module, each.name): each for each in _FUNCTIONS_AND_TYPES},
    ("sglang.srt.weight_sync.tensor_bucket", "FlattenedTensorMetadata"): BucketEntry,
    ("multiprocessing.resource_sharer", "DupFd"): SharedDescriptor,
}
"""All that tensors and buckets of tensors need."""

_STRUCTURE = "PROTO FRAME STOP MARK POP POP_MARK MEMOIZE BINPUT LONG_BINPUT BINGET LONG_BINGET"
_VALUES = (
    "NONE NEWTRUE NEWFALSE BININT BININT1 BININT2 LONG1 BINFLOAT "
    "BINUNICODE SHORT_BINUNICODE BINUNICODE8 BINBYTES SHORT_BINBYTES BINBYTES8"
)
_CONTAINERS = "EMPTY_TUPLE TUPLE TUPLE1 TUPLE2 TUPLE3 EMPTY_LIST APPEND APPENDS EMPTY_DICT SETITEM SETITEMS"
_CALLS = "GLOBAL STACK_GLOBAL REDUCE NEWOBJ BUILD"
_OPCODES = frozenset(f"{_STRUCTURE} {_VALUES} {_CONTAINERS} {_CALLS}".split())
"""What protocols 2 to 5 write for such contents."""


def described(data: bytes, allowed: dict[tuple[str, str], Any] = ALLOWED) -> Any:
    """What a pickle describes. Raises TransferError if it is no pickle or names anything not in `allowed`."""
    try:
        for opcode, argument, _ in pickletools.genops(data):
            if opcode.name not in _OPCODES:
                raise TransferError(f"the pickle uses {opcode.name}, which no tensor needs")
            if opcode.name == "LONG_BINPUT" and int(argument or 0) > len(data):
                raise TransferError("the pickle refers to more objects than it can contain")
        return _Reader(data, allowed).load()
    except TransferError:
        raise
    except Exception as error:
        raise TransferError(f"not a pickle, or a damaged one: {type(error).__name__}: {error}") from None


def decoded(text: object, what: str) -> bytes:
    """The bytes of a base64 string."""
    if not isinstance(text, str):
        raise TransferError(f"{what} must be a base64 string, not {type(text).__name__}")
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise TransferError(f"{what} is not base64: {error}") from None


class _Reader(pickle.Unpickler):
    """Resolves names by a table only."""

    def __init__(self, data: bytes, allowed: dict[tuple[str, str], Any]) -> None:
        super().__init__(io.BytesIO(data))
        self._allowed = allowed

    def find_class(self, module: str, name: str) -> Any:
        """The object that stands for a name."""
        found = self._allowed.get((module, name))
        if found is None:
            raise TransferError(
                f"the pickle names {module}.{name}, which no tensor needs: nothing in it was run"
            )
        return found
