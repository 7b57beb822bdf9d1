"""A trainer in a process of its own, which knows torch and nothing of the engine, and does what it is told
by lines of JSON. `Trainer` is the other end. This file, run as a script, forks them.

It makes groups and payloads as trainers for SGLang and vLLM do, whose packages are not needed for that: two
classes are given the names under which these would pickle them.
"""

from __future__ import annotations

import base64
import contextlib
import ctypes
import dataclasses
import io
import json
import os
import pickle
import secrets
import select
import signal
import socket
import subprocess
import sys
import types
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any


@cache
def nursery() -> tuple[socket.socket, subprocess.Popen[bytes]]:
    """A process that has imported torch, which takes seconds, and forks trainers; and the line to it. It ends
    when this one does."""
    here, there = socket.socketpair()
    command = [sys.executable, __file__, str(there.fileno())]
    silent = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL}
    process = subprocess.Popen(command, pass_fds=[there.fileno()], **silent)
    there.close()
    return here, process


class Trainer:
    """Drives the process."""

    def __init__(self) -> None:
        here, there = socket.socketpair()
        socket.send_fds(nursery()[0], [b"one more"], [there.fileno()])
        there.close()
        self._line, self._told = here, here.makefile("r")
        self._pid = json.loads(self._told.readline())

    def begin(self, what: str, **how: Any) -> None:
        """Tell it to do something."""
        self._line.sendall((json.dumps({"what": what, **how}) + "\n").encode())

    def end(self) -> Any:
        """Wait for what came of it."""
        line = self._told.readline()
        assert line, "the trainer is gone"
        outcome = json.loads(line)
        assert "error" not in outcome, outcome["error"]
        return outcome["result"]

    def do(self, what: str, **how: Any) -> Any:
        """Both."""
        self.begin(what, **how)
        return self.end()

    def close(self) -> None:
        """Kill it; when this returns it is gone."""
        if self._told.closed:
            return
        with contextlib.suppress(ProcessLookupError):
            handle = os.pidfd_open(self._pid)
            signal.pidfd_send_signal(handle, signal.SIGKILL)
            select.select([handle], [], [])
            os.close(handle)
        self._told.close()
        self._line.close()


def free_port() -> int:
    """One that the system gives to nobody meanwhile: below those of outgoing connections, of which tests
    beside make thousands."""
    first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    while True:
        port = first - 1 - secrets.randbelow(first // 2)
        with socket.socket() as found, contextlib.suppress(OSError):
            found.bind(("127.0.0.1", port))
            return port


def flattened(tensors: dict[str, Any], metadata: type) -> dict[str, Any]:
    """SGLang's bucket."""
    import torch

    parts, entries, begin = [], [], 0
    for name, tensor in tensors.items():
        part = tensor.flatten().view(torch.uint8)
        end = begin + part.numel()
        entries.append(metadata(name, tensor.shape, tensor.dtype, begin, end, part.numel()))
        parts.append(part)
        begin = end
    return {"flattened_tensor": torch.cat(parts), "metadata": entries}


def sglang_class(module: str, name: str, fields: Sequence[str]) -> type:
    """A dataclass that pickles under another package's name."""
    made = dataclasses.make_dataclass(name, fields)
    made.__module__ = module
    parts = module.split(".")
    for count in range(1, len(parts) + 1):
        sys.modules.setdefault(".".join(parts[:count]), types.ModuleType(".".join(parts[:count])))
    setattr(sys.modules[module], name, made)
    return made


def bucket_entry() -> type:
    fields = ("name", "shape", "dtype", "start_idx", "end_idx", "numel")
    return sglang_class("sglang.srt.weight_sync.tensor_bucket", "FlattenedTensorMetadata", fields)


def nccl_id_class() -> type:
    """vLLM's, as it is pickled."""
    module, name = "vllm.distributed.device_communicators.pynccl_wrapper", "ncclUniqueId"
    sglang_class(module, name, ())
    fields = {"_fields_": [("internal", ctypes.c_byte * 128)], "__module__": module}
    made = type(name, (ctypes.Structure,), fields)
    setattr(sys.modules[module], name, made)
    return made


def name_gpus_by_uuid() -> None:
    """As SGLang has torch reduce tensors: under a name of its own, with a UUID for the number of a GPU."""
    from multiprocessing.reduction import ForkingPickler

    import torch
    from torch.multiprocessing.reductions import reduce_tensor

    module = "sglang.srt.utils.patch_torch"
    sglang_class(module, "Unused", ())
    rebuild = types.FunctionType((lambda *_: None).__code__, {}, "_rebuild_cuda_tensor_modified")
    rebuild.__module__, rebuild.__qualname__ = module, rebuild.__name__
    sys.modules[module].__dict__[rebuild.__name__] = rebuild

    def reduced(tensor: Any) -> Any:
        _, arguments = reduce_tensor(tensor)
        uuid = str(torch.cuda.get_device_properties(arguments[6]).uuid)
        return rebuild, (*arguments[:6], uuid, *arguments[7:])

    ForkingPickler.register(torch.Tensor, reduced)


def serialized(given: Any) -> str:
    """As SGLang's clients do it."""
    from multiprocessing.reduction import ForkingPickler

    buffer = io.BytesIO()
    ForkingPickler(buffer).dump(given)
    return base64.b64encode(buffer.getvalue()).decode()


class _Script:
    def __init__(self) -> None:
        self._tensors: dict[str, Any] = {}
        self._group: Any = None
        self._communicator: Any = None
        self._store: Any = None
        self._rank = self._num_barriers = 0
        self._kept: list[Any] = []
        self._lent: list[Any] = []

    def load(self, file: str, device: str = "cpu") -> int:
        import torch

        self._tensors = {name: each.to(device) for name, each in torch.load(file).items()}
        return len(self._tensors)

    def overwrite(self) -> None:
        """Use the memory of what was sent for something else, as soon as it was answered."""
        import torch

        for tensor in self._lent:
            tensor.fill_(torch.finfo(tensor.dtype).max if tensor.is_floating_point() else 255)
        torch.cuda.synchronize()
        self._kept.clear()
        self._lent.clear()
        torch.cuda.ipc_collect()

    def handles(self, packed: bool, names: list[str] | None = None) -> dict[str, Any]:
        """An `update_info` of vLLM's IPC transfer."""
        import torch
        from torch.multiprocessing.reductions import reduce_tensor

        tensors = {name: self._tensors[name].clone() for name in names or self._tensors}
        told = self.announce(names)
        uuid = str(torch.cuda.get_device_properties(0).uuid)
        if packed:
            flat = [each.view(-1).view(torch.uint8) for each in tensors.values()]
            told["tensor_sizes"] = [each.numel() for each in flat]
            self._lent.append(torch.cat([*flat, torch.zeros(1000, dtype=torch.uint8, device="cuda")]))
            given: Any = {uuid: reduce_tensor(self._lent[-1])[1]}
        else:
            self._lent += tensors.values()
            given = [{uuid: reduce_tensor(each)[1]} for each in tensors.values()]
        torch.cuda.synchronize()
        told["dtype_names"] = told.pop("dtypes")
        return {**told, "ipc_handles_pickled": base64.b64encode(pickle.dumps(given)).decode()}

    def serialize(self, kind: str, names: list[str] | None = None) -> str:
        import torch.multiprocessing

        torch.multiprocessing.set_sharing_strategy("file_system")
        tensors = {name: self._tensors[name].clone() for name in names or self._tensors}
        given: Any = list(tensors.items())
        if kind == "bytes":
            return base64.b64encode(pickle.dumps(given)).decode()
        if kind == "bucket":
            given = flattened(tensors, bucket_entry())
        self._kept.append(given)
        self._lent += [given["flattened_tensor"]] if kind == "bucket" else tensors.values()
        if self._lent[-1].is_cuda:
            torch.cuda.synchronize()
            name_gpus_by_uuid()
        return serialized(given)

    def lend_buffer(self, address: str, size: int, names: list[str], shift: int = 0) -> list[str]:
        """Fill a buffer again and again and say what is in it, as checkpoint-engine does; the answers.
        `shift`: what is said is wrong by so much."""
        from multiprocessing.reduction import ForkingPickler

        import torch.multiprocessing
        import zmq
        from torch.multiprocessing.reductions import reduce_tensor

        torch.multiprocessing.set_sharing_strategy("file_system")
        buckets: list[list[str]] = [[]]
        for name in names:
            if sum(self._tensors[each].nbytes for each in [*buckets[-1], name]) > size:
                buckets.append([])
            buckets[-1].append(name)
        buffer = torch.empty(2 * size, dtype=torch.uint8, device=self._tensors[names[0]].device)
        with zmq.Context.instance().socket(zmq.REQ) as asking:
            asking.bind(address)
            asking.send(bytes(ForkingPickler.dumps(reduce_tensor(buffer))))
            for number, bucket in enumerate(buckets):
                told, begin = [], number % 2 * size
                for name in bucket:
                    flat = self._tensors[name].contiguous().view(-1).view(torch.uint8)
                    buffer[begin : begin + flat.numel()] = flat
                    tensor = self._tensors[name]
                    entry = {"name": name, "shape": tensor.shape, "dtype": tensor.dtype}
                    told.append({**entry, "offset": begin + shift})
                    begin += flat.numel()
                if buffer.is_cuda:
                    torch.cuda.synchronize()
                if problem := asking.recv().decode():
                    asking.send_pyobj(RuntimeError("Some workers failed to update weights"))
                    return [problem]
                asking.send_pyobj(told)
            answers = [asking.recv().decode()]
            for _ in range(2):
                asking.send_pyobj(None)
                answers.append(asking.recv().decode())
            return answers

    def announce(self, names: list[str] | None = None) -> dict[str, Any]:
        tensors = {name: self._tensors[name] for name in names or self._tensors}
        return {
            "names": list(tensors),
            "dtypes": [str(each.dtype).removeprefix("torch.") for each in tensors.values()],
            "shapes": [list(each.shape) for each in tensors.values()],
        }

    def meet(self, port: int, name: str, backend: str = "gloo") -> None:
        """Make a group as SGLang's clients do: beside torch's own registry."""
        import torch.distributed.distributed_c10d as c10d

        timeout = c10d.default_pg_timeout
        store, rank, size = next(iter(c10d.rendezvous(f"tcp://127.0.0.1:{port}", 0, 2, timeout=timeout)))
        store = c10d.PrefixStore(name, store)
        self._group, _ = c10d._new_process_group_helper(
            size, rank, [], c10d.Backend(backend), store, group_name=name, timeout=timeout
        )
        c10d._world.pg_group_ranks[self._group] = {0: 0, 1: 1}

    def meet_as_vllm(self, port: int) -> None:
        """Rank 0 of vLLM's stateless group."""
        import torch
        import torch.distributed as dist

        from ostinato.engine.weight_sync.nccl_library import Communicator

        store = dist.TCPStore("127.0.0.1", port, 2, True, wait_for_workers=False, use_libuv=False)
        id = nccl_id_class()()
        assert ctypes.CDLL("libnccl.so.2").ncclGetUniqueId(ctypes.byref(id)) == 0
        store.set("broadcast_from/0/0", pickle.dumps(id))
        self._communicator = Communicator(bytes(id), 0, 2, torch.device("cuda", 1))
        with torch.cuda.device(1):
            self._communicator.sum_floats(torch.zeros(1, device="cuda"))
            torch.cuda.synchronize()
        self._kept.append(store)

    def meet_as_trl(self, port: int, rank: int = 1) -> None:
        """The last rank of vLLM's stateless group, whose first the server keeps; on a CPU by gloo."""
        import torch.distributed as dist

        self._rank, self._num_barriers = rank, 0
        self._store = dist.TCPStore("127.0.0.1", port, rank + 1, False, use_libuv=False)
        self._group = dist.ProcessGroupGloo(dist.PrefixStore("gloo", self._store), rank, rank + 1)

    def send_as_trl(self, name: str) -> None:
        """Broadcast one parameter, and wait as vLLM's barrier does."""
        import torch.distributed as dist

        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = self._rank, 0
        self._group.broadcast([self._tensors[name].contiguous()], options).wait()
        barrier = pickle.loads(self._store.get(f"broadcast_from/0/{self._num_barriers}"))
        self._num_barriers += 1
        self._store.set(f"arrival_{barrier}_{self._rank}", b"1")
        for other in range(self._rank + 1):
            self._store.get(f"arrival_{barrier}_{other}")
        self._store.set(f"departure_{barrier}_{self._rank}", b"1")

    def leave_as_trl(self) -> None:
        self._group = self._store = None

    def meet_plainly(self, port: int) -> None:
        import torch.distributed as dist

        dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=0, world_size=2)
        self._group = dist.group.WORLD

    def part(self) -> None:
        import torch.distributed as dist

        dist.destroy_process_group(self._group)

    def broadcast(
        self, names: list[str] | None = None, packed: int | None = None, bucket: bool = False
    ) -> None:
        import torch
        import torch.distributed as dist

        chosen = [self._tensors[name] for name in names or self._tensors]
        if bucket:
            chosen = [torch.cat([each.flatten().view(torch.uint8) for each in chosen])]
        elif packed is not None:
            chosen = self._packed(chosen, packed)
        for tensor in chosen:
            if self._communicator is not None:
                self._communicator.broadcast(tensor.contiguous(), 0)
                torch.cuda.synchronize()
            else:
                dist.broadcast(tensor.contiguous(), 0, group=self._group)

    def _packed(self, tensors: list[Any], limit: int) -> list[Any]:
        import torch

        chunks: list[list[Any]] = [[]]
        for tensor in tensors:
            chunks[-1].append(tensor.contiguous().view(torch.uint8).view(-1))
            if sum(each.numel() for each in chunks[-1]) > limit:
                chunks.append([])
        return [torch.cat(chunk) for chunk in chunks if chunk]


def train(line: socket.socket) -> None:
    """What a trainer does: as it is told."""
    script = _Script()

    def tell(told: Any) -> None:
        line.sendall((json.dumps(told) + "\n").encode())

    tell(os.getpid())
    for given in line.makefile("r"):
        asked = json.loads(given)
        try:
            told = {"result": getattr(script, asked.pop("what"))(**asked)}
        except Exception as error:
            told = {"error": f"{type(error).__name__}: {error}"}
        tell(told)


def fork_trainers(line: socket.socket) -> None:
    """One for each that is asked for on the line, until it ends."""
    import torch
    import torch.distributed
    import torch.multiprocessing

    assert not torch.cuda.is_initialized(), "a device does not survive a fork"
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for them
    while True:
        asked, given, _, _ = socket.recv_fds(line, 64, 1)
        if not asked:
            return
        [trainers] = given
        os.set_inheritable(trainers, False)
        if os.fork() == 0:
            line.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            try:
                train(socket.socket(fileno=trainers))
            finally:
                os._exit(0)
        os.close(trainers)


if __name__ == "__main__":
    fork_trainers(socket.socket(fileno=int(sys.argv[1])))
