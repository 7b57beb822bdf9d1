"""A first capture does not wait for torch's compiler to be imported; where it is, it keeps out of modes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SOURCES = Path(__file__).parents[2] / "src"

CAPTURE = """
import sys
import torch
from ostinato.graphs import graphed

model = torch.nn.Linear(4, 4)
x = torch.randn(2, 4)
assert torch.equal(graphed(model, ladder=[1, 2])(x), model(x))
assert not any(name.startswith("torch._dynamo") for name in sys.modules)
"""

COMPILER_IMPORTED_LATER = """
import sys
import torch
from ostinato.graphs.backends.cold_kernels import refuse_cold_kernels
from ostinato.graphs.journal import WriteJournal
from ostinato.graphs.errors import ColdKernelError

x = torch.ones(4)
try:
    with refuse_cold_kernels():
        with WriteJournal() as journal:
            x.add_(1)
            assert "torch._dynamo" not in sys.modules
            import torch._dynamo
            x.mul_(2)
        torch.compile(torch.sin, backend="eager")
        print("imported")
        torch.compile(lambda x: x + 1, backend="eager")(x)
except ColdKernelError as error:
    print(error)
work = [str(func) for func, _ in journal.work]
assert (work[0], work[-1]) == ("aten.add_.Tensor", "aten.mul_.Tensor"), work
journal.undo()
assert x.tolist() == [1] * 4
"""


def run(program: str) -> str:
    environment = {**os.environ, "PYTHONPATH": str(SOURCES)}
    result = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=100
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_a_capture_imports_no_compiler() -> None:
    run(CAPTURE)


@pytest.mark.slow
def test_a_compiler_imported_later_keeps_out_of_modes_and_may_not_compile_while_recording() -> None:
    imported, refused = run(COMPILER_IMPORTED_LATER).splitlines()
    assert imported == "imported"
    assert "torch.compile compiled something during recording" in refused
