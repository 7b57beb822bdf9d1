"""The process for long texts: it may take its time, and may be ended in the middle.

It reads frames from standard input (a length, then msgpack) and answers each on standard output. The first
one is a `Start`, the others are `TextWork`.
"""

from __future__ import annotations

import array
import os
import resource
import struct
import sys
from typing import BinaryIO

import msgspec

from ostinato.text.tokenizer import Tokenizer

from ..parent_death import die_with_parent
from .work import Conversation, TextRefused, TextWork, do_text_work

LENGTH = struct.Struct("<Q")


class Start(msgspec.Struct, frozen=True):
    """Whose text it is."""

    directory: str
    chat_template: str | None
    memory_bytes: int
    """Address space that the process may take."""


class Done(msgspec.Struct, frozen=True, tag=True):
    """Token ids, four bytes each."""

    ids: bytes


class Refused(msgspec.Struct, frozen=True, tag=True):
    """What is wrong with the text."""

    message: str
    code: str | None = None
    field: str | None = None


Answer = Done | Refused


def main() -> None:
    """Work until nobody asks any more."""
    die_with_parent()
    os.nice(5)
    # Nothing else may write where the answers go.
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    if not (first := _frame(sys.stdin.buffer)):
        return
    start = msgspec.msgpack.decode(first, type=Start)
    resource.setrlimit(resource.RLIMIT_AS, (start.memory_bytes, start.memory_bytes))
    tokenizer = Tokenizer.from_directory(start.directory)
    if start.chat_template is not None:
        tokenizer = tokenizer.with_chat_template(start.chat_template)
    decode, encode = msgspec.msgpack.Decoder(TextWork).decode, msgspec.msgpack.Encoder().encode
    while frame := _frame(sys.stdin.buffer):
        answer = encode(_answered(decode(frame), tokenizer))
        try:
            answers.write(LENGTH.pack(len(answer)) + answer)
            answers.flush()
        except BrokenPipeError:  # who asked was killed
            os._exit(0)


def _answered(work: TextWork, tokenizer: Tokenizer) -> Answer:
    try:
        return Done(array.array("i", do_text_work(work, tokenizer)).tobytes())
    except TextRefused as error:
        return Refused(str(error), error.code, error.field)
    except RecursionError:
        return Refused("the messages are nested too deeply")
    except MemoryError:
        if isinstance(work.given, Conversation) and work.given.template is not None:
            return Refused("chat_template takes too much memory to run", "text_too_hard", "chat_template")
        return Refused("the text takes too much memory to tokenise", "text_too_hard")


def _frame(source: BinaryIO) -> bytes:
    """Returns nothing at the end, also in the middle of a frame: who wrote it was killed."""
    head = source.read(LENGTH.size)
    size = LENGTH.unpack(head)[0] if len(head) == LENGTH.size else 0
    frame = source.read(size)
    return frame if len(frame) == size else b""


if __name__ == "__main__":
    main()
