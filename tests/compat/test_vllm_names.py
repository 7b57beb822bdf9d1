"""`import ostinato.compat.vllm`: what programs that import vLLM by name then find, and what they are told.

What TRL does with it is in `test_trl.py`, which is slow and needs TRL.
"""

import importlib
import importlib.metadata
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import ostinato
from engine.conftest import TinyModel
from ostinato.engine.resolved_config import _own_device
from ostinato.engine.vllm_api.llm_options import llm_options
from ostinato.engine.vllm_api.module_paths import PATHS
from ostinato.graphs import ConfigError

OF_TRL = {
    "vllm": ("LLM", "RequestOutput", "SamplingParams"),
    "vllm.sampling_params": ("StructuredOutputsParams",),
    "vllm.utils.network_utils": ("get_ip", "get_open_port"),
    "vllm.distributed.weight_transfer.nccl_common": ("trainer_init",),
    "vllm.distributed.weight_transfer.packed_tensor": ("packed_nccl_broadcast_producer",),
}
"""Every name that TRL 1.16.0 imports from vLLM 0.28 to 0.31."""


@pytest.fixture(autouse=True)
def nobody_has_been_here() -> Iterator[None]:
    """Other tests play vLLM's trainers, in this process, too."""

    def concerned() -> list[str]:
        return [
            name
            for name in sys.modules
            if name.split(".")[0] in ("vllm", "trl") or name == "ostinato.compat.vllm"
        ]

    kept, finders = {name: sys.modules.pop(name) for name in concerned()}, list(sys.meta_path)
    yield
    sys.meta_path[:] = finders
    for name in concerned():
        del sys.modules[name]
    sys.modules.update(kept)


def stand_in() -> ModuleType:
    return importlib.import_module("ostinato.compat.vllm")


def test_what_trl_imports_is_there() -> None:
    stand_in()
    for path, names in OF_TRL.items():
        module = importlib.import_module(path)
        assert all(callable(getattr(module, name)) for name in names)
    import vllm
    from vllm.entrypoints.llm import LLM
    from vllm.sampling_params import SamplingParams

    assert vllm.LLM is LLM
    assert issubclass(LLM, ostinato.LLM)
    assert vllm.SamplingParams is SamplingParams is ostinato.SamplingParams
    assert {"LLM", "RequestOutput"} <= {*dir(vllm)}
    assert "CudaGraphRunner" not in vllm.__all__, "not a name of vLLM's"


def test_who_asks_whether_vllm_is_there_is_told_so() -> None:
    with pytest.raises(importlib.metadata.PackageNotFoundError):
        importlib.metadata.version("vllm")
    assert importlib.util.find_spec("vllm") is None
    version = stand_in().VERSION
    assert importlib.util.find_spec("vllm") is not None
    assert importlib.metadata.version("vllm") == version == importlib.import_module("vllm").__version__
    assert importlib.metadata.packages_distributions()["vllm"] == ["vllm"]
    assert version.endswith("+ostinato"), "whoever prints it sees what it is"
    assert importlib.metadata.version("numpy"), "others are found as before"
    importlib.reload(sys.modules["ostinato.compat.vllm"])
    assert len([each for each in sys.meta_path if getattr(each, "package", None) == "vllm"]) == 1


def test_what_is_not_covered_cannot_be_imported_and_says_so() -> None:
    stand_in()
    with pytest.raises(ModuleNotFoundError, match=r"'vllm.model_executor'.*Ostinato replaces vLLM here"):
        importlib.import_module("vllm.model_executor.layers")
    with pytest.raises(ImportError, match=r"'vllm.ToyModel': Ostinato replaces vLLM here"):
        from vllm import ToyModel  # noqa: F401
    with pytest.raises(ImportError, match=r"'vllm.distributed.make_ray': Ostinato replaces vLLM here"):
        from vllm.distributed import make_ray  # noqa: F401
    with pytest.raises(ImportError, match=r"'vllm.config.RayConfig': Ostinato replaces vLLM here"):
        from vllm.config import RayConfig  # noqa: F401
    import vllm

    assert not hasattr(vllm, "ToyModel")
    with pytest.raises(ModuleNotFoundError, match="No module named 'vllmish'"):
        importlib.import_module("vllmish")


def test_every_path_of_the_table_can_be_imported() -> None:
    """`vllm.engine` too, which is no module of vLLM's here but the way to three."""
    stand_in()
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.engine.async_llm_engine import AsyncLLMEngine

    assert (AsyncEngineArgs, AsyncLLMEngine) == (ostinato.AsyncEngineArgs, ostinato.AsyncLLMEngine)
    for path in PATHS:
        module = importlib.import_module(f"vllm.{path}")
        assert all(hasattr(module, name) for name in module.__all__)


def test_an_installed_vllm_is_hidden_only_if_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "__init__.py").write_text("__version__ = '0.31.0'\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ImportError, match=r"vLLM is installed .*vllm/__init__.py.*OSTINATO_HIDES_VLLM=1"):
        stand_in()
    assert importlib.import_module("vllm").__version__ == "0.31.0"
    monkeypatch.setenv("OSTINATO_HIDES_VLLM", "1")
    with pytest.raises(ImportError, match=r"vllm was already imported: import ostinato\.compat"):
        stand_in()
    del sys.modules["vllm"]
    version = stand_in().VERSION
    assert importlib.import_module("vllm").__version__ == version


def test_it_comes_before_trl(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "trl.generation.vllm_generation"
    monkeypatch.setitem(sys.modules, name, ModuleType(name))
    with pytest.raises(ImportError, match=f"{name} was already imported: import ostinato"):
        stand_in()


def test_a_prompt_that_cannot_be_served_fails_the_call(tiny: TinyModel) -> None:
    stand_in()
    from vllm import LLM, SamplingParams

    good, bad = {"prompt_token_ids": [1, 2]}, {"prompt_token_ids": [1] * 40}
    with LLM(tiny.directory, max_model_len=32, max_num_seqs=2, enforce_eager=True) as llm:
        with pytest.raises(ValueError, match=r"prompt 1 of 2: .*32"):
            llm.generate([good, bad], SamplingParams(max_tokens=2), use_tqdm=False)
        [output] = llm.generate([good], SamplingParams(max_tokens=2), use_tqdm=False)
        assert output.finished


# -- what TRL asks of an engine ----------------------------------------------------------------------


def as_trl(**changed: Any) -> dict[str, Any]:
    """The keywords of TRL 1.16.0's one call of `LLM`."""
    return {
        "tensor_parallel_size": 1,
        "gpu_memory_utilization": 0.3,
        "max_model_len": None,
        "max_num_seqs": 16,
        "enable_sleep_mode": True,
        "model_impl": "auto",
        "distributed_executor_backend": "external_launcher",
        "seed": 3,
        "max_num_batched_tokens": 4096,
        "logprobs_mode": "processed_logprobs",
        "quantization": None,
        "trust_remote_code": False,
        **changed,
    }


def test_its_options_act() -> None:
    config, _ = llm_options("m", as_trl())
    assert (config.mem_fraction, config.max_running_requests, config.seed) == (0.3, 16, 3)
    assert (config.enable_sleep_mode, config.logprobs_mode) == (True, "processed_logprobs")
    assert (config.max_model_len, config.device) == (None, "auto")


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"tensor_parallel_size": 2}, "tensor_parallel_size can only be 1"),
        ({"quantization": "bitsandbytes"}, "quantization is not supported"),
        ({"model_impl": "transformers"}, "model_impl can only be auto or vllm"),
        ({"logprobs_mode": "processed_logits"}, "unknown logprobs_mode 'processed_logits'"),
        ({"distributed_executor_backend": "ray"}, "not 'ray': the engine is one process"),
    ],
)
def test_what_cannot_be_had_is_refused_by_name(given: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        llm_options("m", as_trl(**given))


def test_each_process_of_a_launcher_has_its_own_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    assert _own_device() == torch.device("cuda", 0)
    monkeypatch.setattr("torch.cuda.is_initialized", lambda: True)
    monkeypatch.setattr("torch.cuda.current_device", lambda: 2)
    assert _own_device() == torch.device("cuda", 2)
