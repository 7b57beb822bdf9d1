"""Choosing an attention backend."""

import subprocess
import sys

import pytest

from ostinato.graphs import Capability
from ostinato.kernels.attention import BackendError, get_backend


@pytest.mark.parametrize("name", ["torch", "auto"])
def test_a_cpu_gets_the_reference(name):
    backend = get_backend(name, "cpu")
    assert backend.name == "torch"
    assert Capability[backend.capability] is Capability.ALWAYS


def test_an_unknown_name_is_refused_with_the_names_there_are():
    with pytest.raises(BackendError, match=r"'flashinfer'.*auto, torch, triton"):
        get_backend("flashinfer", "cpu")


def test_triton_on_a_cpu_is_refused_with_what_to_do(monkeypatch):
    gpu_ops = pytest.importorskip("ostinato.kernels.attention.gpu_ops", exc_type=ImportError)
    monkeypatch.setattr(gpu_ops, "INTERPRETED", False)
    with pytest.raises(BackendError, match="needs a CUDA device, not cpu: use torch"):
        get_backend("triton", "cpu")


def test_without_the_triton_package_the_error_says_so(monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", None)
    for module in ("attention.gpu_ops", "dependent_launch"):
        monkeypatch.delitem(sys.modules, f"ostinato.kernels.{module}", raising=False)
    monkeypatch.delattr("ostinato.kernels.attention.gpu_ops", raising=False)
    with pytest.raises(BackendError, match="pip install triton"):
        get_backend("triton", "cuda")


def test_the_reference_does_not_load_triton():
    code = (
        "import sys, torch; before = 'triton' in sys.modules; "
        "from ostinato.kernels.attention import get_backend; import ostinato.kernels.sampling.asking_rows; "
        "get_backend('auto', 'cpu'); assert before or 'triton' not in sys.modules; "
        "assert 'ostinato.kernels.attention.gpu_ops' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=100)
