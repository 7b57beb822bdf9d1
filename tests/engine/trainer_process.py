"""A trainer in a process of its own, which knows torch and nothing of the engine: run as a script, it does
what it is told by lines of JSON. `Trainer` is the other end.

It makes groups and payloads as trainers for SGLang and vLLM do, whose packages are not needed for that: two
classes are given the names under which these would pickle them.
"""

from __future__ import annotations

import base64
import dataclasses
import io
import json
import pickle
import socket
import subprocess
import sys
import types
from collections.abc import Sequence
from typing import Any


class Trainer:
    """Drives the process."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def begin(self, what: str, **how: Any) -> None:
        """Tell it to do something."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"what": what, **how}) + "\n")
        self._process.stdin.flush()

    def end(self) -> Any:
        """Wait for what came of it."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, "the trainer is gone"
        outcome = json.loads(line)
        assert "error" not in outcome, outcome["error"]
        return outcome["result"]

    def do(self, what: str, **how: Any) -> Any:
        """Both."""
        self.begin(what, **how)
        return self.end()

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                stream.close()


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
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
        self._kept: list[Any] = []

    def load(self, file: str, dtype: str = "float32") -> int:
        import torch

        self._tensors = {name: each.to(getattr(torch, dtype)) for name, each in torch.load(file).items()}
        return len(self._tensors)

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
        return serialized(given)

    def announce(self, names: list[str] | None = None) -> dict[str, Any]:
        tensors = {name: self._tensors[name] for name in names or self._tensors}
        return {
            "names": list(tensors),
            "dtypes": [str(each.dtype).removeprefix("torch.") for each in tensors.values()],
            "shapes": [list(each.shape) for each in tensors.values()],
        }

    def meet(self, port: int, name: str) -> None:
        """Make a group as SGLang's clients do: beside torch's own registry."""
        import torch.distributed.distributed_c10d as c10d

        timeout = c10d.default_pg_timeout
        store, rank, size = next(iter(c10d.rendezvous(f"tcp://127.0.0.1:{port}", 0, 2, timeout=timeout)))
        store = c10d.PrefixStore(name, store)
        self._group, _ = c10d._new_process_group_helper(
            size, rank, [], c10d.Backend("gloo"), store, group_name=name, timeout=timeout
        )
        c10d._world.pg_group_ranks[self._group] = {0: 0, 1: 1}

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
            dist.broadcast(tensor.contiguous(), 0, group=self._group)

    def _packed(self, tensors: list[Any], limit: int) -> list[Any]:
        import torch

        chunks: list[list[Any]] = [[]]
        for tensor in tensors:
            chunks[-1].append(tensor.contiguous().view(torch.uint8).view(-1))
            if sum(each.numel() for each in chunks[-1]) > limit:
                chunks.append([])
        return [torch.cat(chunk) for chunk in chunks if chunk]


def main() -> None:
    script = _Script()
    for line in sys.stdin:
        asked = json.loads(line)
        try:
            told = {"result": getattr(script, asked.pop("what"))(**asked)}
        except Exception as error:
            told = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(told), flush=True)


if __name__ == "__main__":
    main()
