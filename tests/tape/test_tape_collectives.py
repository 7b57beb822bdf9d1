"""Collectives on two ranks: recorded once, run again at every replay."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

PROGRAM = """
import os
import sys
import torch
import torch._dynamo  # collectives would import it, later
import torch.distributed as dist
import torch.distributed._functional_collectives as fc
from tape_recording import record

# Of what is imported above, which takes seconds, both have the same.
other = os.fork()
rank, path = int(other == 0), sys.argv[1]
dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=2)
group = dist.group.WORLD
x = torch.full((4,), float(rank + 1))
plain = torch.zeros(4)

def step():
    summed = fc.all_reduce(x * 10, "sum", group)
    gathered = fc.all_gather_tensor(summed + rank, 0, group)
    scattered = fc.reduce_scatter_tensor(gathered, "sum", 0, group)
    plain.copy_(x)
    dist.all_reduce(plain)
    return summed + 1, gathered, scattered, plain * 2, fc.all_reduce(x, "sum", group)

recorded = record(step)
assert plain.tolist() == [0] * 4, plain
for factor in (1.0, 5.0):
    x.fill_((rank + 1) * factor)
    summed, gathered, scattered, doubled, direct = recorded.replay()
    total = 30 * factor
    assert summed.tolist() == [total + 1] * 4, summed
    assert gathered.tolist() == [total] * 4 + [total + 1] * 4, gathered
    assert scattered.tolist() == [2 * (total + rank)] * 4, scattered
    assert doubled.tolist() == [6 * factor] * 4, doubled
    assert direct.tolist() == [3 * factor] * 4, direct
dist.destroy_process_group()
if rank == 0:
    assert os.waitpid(other, 0)[1] == 0, "the other rank failed"
    print("both agree")
"""


@pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="needs gloo")
def test_two_ranks(tmp_path):
    here = Path(__file__).parent
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(here), str(here.parents[1] / "src")])}
    environment["GLOO_SOCKET_IFNAME"] = "lo"
    command = [sys.executable, "-c", PROGRAM, str(tmp_path / "meeting")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=90)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "both agree\n"
