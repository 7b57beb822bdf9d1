"""The process from which those of grammars are forked: it has the library, the vocabulary and nothing else.

`python -m ostinato.grammars.nursery CONTROL VOCABULARY`: descriptors of a socket and of an in-memory file. It
ends when the socket is closed, and everything that it has forked ends with it.
"""

from __future__ import annotations

import array
import gc
import json
import os
import signal
import socket
import sys

from ostinato.text.errors import GrammarError
from ostinato.text.grammar import mask_words

from .layout import SharedMemory
from .library import Library
from .worker import WorkerLimits, die_with_parent, main

READY = b"ready"


def pack_vocabulary(tokens: list[bytes], vocab_size: int, stop_token_ids: list[int]) -> int:
    """Write an in-memory file for `_read_vocabulary`, and return its descriptor."""
    lengths = array.array("i", map(len, tokens))
    head = json.dumps({"vocab_size": vocab_size, "stop_token_ids": stop_token_ids, "tokens": len(tokens)})
    descriptor = os.memfd_create("ostinato-vocabulary", os.MFD_CLOEXEC)
    with open(descriptor, "wb", closefd=False) as file:
        file.write(head.encode() + b"\n" + lengths.tobytes() + b"".join(tokens))
    os.lseek(descriptor, 0, os.SEEK_SET)
    return descriptor


def _read_vocabulary(descriptor: int) -> tuple[list[bytes], int, list[int]]:
    with open(descriptor, "rb") as file:
        head = json.loads(file.readline())
        lengths = array.array("i", file.read(4 * head["tokens"]))
        joined, at, tokens = file.read(), 0, []
        for length in lengths:
            tokens.append(joined[at : at + length])
            at += length
    return tokens, head["vocab_size"], head["stop_token_ids"]


def _serve(control: socket.socket, library: Library, words: int) -> None:
    """Fork a process for every packet, which contains its limits and comes with its socket and its memory."""
    gc.collect()
    gc.freeze()
    while True:
        packet, descriptors, _, _ = socket.recv_fds(control, 256, 2)
        if not packet:
            return
        channel = socket.socket(fileno=descriptors[0])
        child = _fork()
        if child == 0:
            control.close()
            die_with_parent(_NURSERY)
            limits = WorkerLimits(*json.loads(packet))
            main(channel, SharedMemory(descriptors[1], words), library, limits)
        channel.close()
        os.close(descriptors[1])
        _tell_born(control, child)


def _fork() -> int:
    """0 in the child; -1 if forking failed."""
    try:
        return os.fork()
    except OSError:
        return -1


def _tell_born(control: socket.socket, child: int) -> None:
    """Send a handle with which the engine can kill the child, even if its process id is reused."""
    try:
        handle = os.pidfd_open(child) if child > 0 else -1
    except OSError:
        handle = -1  # already dead
    if handle < 0:
        control.send(b"gone")
        return
    socket.send_fds(control, [b"born"], [handle])
    os.close(handle)


_NURSERY = os.getpid()

if __name__ == "__main__":
    # The engine ends it by closing the socket; a signal to the whole process group is meant for the engine.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # children need not be waited for
    _control = socket.socket(fileno=int(sys.argv[1]))
    try:
        _vocabulary, _vocab_size, _stops = _read_vocabulary(int(sys.argv[2]))
        _library = Library(_vocabulary, _vocab_size, _stops)
        _library.warm_up()
    except (GrammarError, ImportError, AttributeError, RuntimeError) as error:
        _control.send(f"structured outputs are not available: {error}".encode()[:2000])
        sys.exit(1)
    _control.send(READY)
    _serve(_control, _library, mask_words(_vocab_size))
