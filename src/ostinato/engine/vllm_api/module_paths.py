"""vLLM's module paths under our name: `from ostinato.sampling_params import SamplingParams` and the like.

A script that is ported by changing `vllm` to `ostinato` imports its names from vLLM's paths. No such files
exist: the table says which names each path has and where they are defined, and a finder creates the modules
when they are imported. A real module takes precedence over the table. `ostinato.compat.vllm` offers the same
paths under vLLM's own name.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

_OUTPUTS = "engine.outputs RequestOutput CompletionOutput"
_POOLED = (
    "engine.pooling_outputs PoolingRequestOutput PoolingOutput EmbeddingRequestOutput EmbeddingOutput "
    "ClassificationRequestOutput ClassificationOutput ScoringRequestOutput ScoringOutput"
)
_SAMPLING = "engine.parameters.sampling_params SamplingParams RequestOutputKind"
_STRUCTURED = "text.structured StructuredOutputs"
_BEAMS = "engine.parameters.sampling_params BeamSearchParams"
_BEAMS_FOUND = "engine.vllm_api.beam_search BeamSearchOutput BeamSearchSequence"
_ARGUMENTS = "engine.vllm_api.engine_args EngineArgs AsyncEngineArgs"
_PROMPTS = "engine.vllm_api.prompts TextPrompt TokensPrompt PromptType"
_PARSER = "engine.vllm_api.argument_parser FlexibleArgumentParser"
_ENGINE = "engine.vllm_api.llm_engine LLMEngine"
_ASYNC = "engine.async_llm AsyncLLM"
_CONFIGS = (
    "engine.vllm_api.config_objects CompilationConfig CompilationLevel CompilationMode CUDAGraphMode "
    "PoolerConfig ProfilerConfig StructuredOutputsConfig AttentionConfig WeightTransferConfig"
)
_PROCESSORS = (
    "engine.sampling.logits_processors LogitsProcessor AdapterLogitsProcessor BatchUpdate "
    "MoveDirectionality RequestLogitsProcessor process_dict_updates"
)
_SHOWN = "engine.vllm_api.printing print_embeddings random_uuid"

_NETWORK = "engine.vllm_api.network get_ip get_open_port"
_TRANSFER = "engine.vllm_api.transfer_requests WeightTransferInitRequest WeightTransferUpdateRequest"

PATHS: dict[str, tuple[str, ...]] = {
    "beam_search": (_BEAMS, _BEAMS_FOUND),
    "config": (_CONFIGS, "engine.vllm_api.engine_view VllmConfigView=VllmConfig"),
    "distributed": ("engine.vllm_api.cleaning cleanup_dist_env_and_memory",),
    "distributed.device_communicators": (),
    "distributed.device_communicators.pynccl": ("engine.weight_sync.stateless_groups PyNcclCommunicator",),
    "distributed.parallel_state": ("engine.vllm_api.worker get_world_group",),
    "distributed.utils": ("engine.weight_sync.stateless_groups StatelessProcessGroup",),
    "distributed.weight_transfer": (_TRANSFER,),
    "distributed.weight_transfer.base": (_TRANSFER,),
    "distributed.weight_transfer.nccl_common": ("engine.vllm_api.trainer_side trainer_init",),
    "distributed.weight_transfer.packed_tensor": (
        "engine.vllm_api.trainer_side packed_nccl_broadcast_producer",
    ),
    "engine.arg_utils": (_ARGUMENTS,),
    "engine.async_llm_engine": (_ASYNC, "engine.async_llm AsyncLLMEngine"),
    "engine.llm_engine": (_ENGINE,),
    "entrypoints": (),
    "entrypoints.llm": ("engine.llm LLM",),
    "inputs": (_PROMPTS,),
    "inputs.data": (_PROMPTS,),
    "logger": ("engine.vllm_api.printing init_logger",),
    "logprobs": ("engine.outputs Logprob",),
    "lora": (),
    "lora.request": ("engine.adapters.lora_request LoRARequest",),
    "outputs": (_OUTPUTS, _POOLED),
    "pooling_params": ("engine.vllm_api.pooling_params PoolingParams",),
    "sampling_params": (
        *(_SAMPLING, _BEAMS, _STRUCTURED),
        "engine.parameters.sampling_params StructuredOutputsParams GuidedDecodingParams RequestError",
    ),
    "sequence": ("engine.outputs Logprob", "engine.outputs RequestTimes=RequestMetrics"),
    "utils": (_PARSER, _SHOWN, _NETWORK),
    "utils.argparse_utils": (_PARSER,),
    "utils.network_utils": (_NETWORK,),
    "utils.print_utils": (_SHOWN,),
    "v1": (),
    "v1.engine": (),
    "v1.engine.async_llm": (_ASYNC,),
    "v1.engine.llm_engine": (_ENGINE,),
    "v1.metrics": (),
    "v1.metrics.reader": ("engine.vllm_api.metrics Metric Counter Gauge Histogram Vector",),
    "v1.sample": (),
    "v1.sample.logits_processor": (_PROCESSORS,),
    "v1.sample.logits_processor.builtin": (_PROCESSORS,),
    "v1.sample.logits_processor.interface": (_PROCESSORS,),
}
"""By path after `ostinato.`: each line names a module of ours and its names there; `ours=theirs` renames."""


def names_of(path: str) -> dict[str, tuple[str, str]]:
    """The names of a path, each with our module and the name there; empty for a mere folder."""
    found = {}
    for line in PATHS.get(path, ()):
        home, *names = line.split()
        for name in names:
            ours, _, theirs = name.partition("=")
            found[theirs or ours] = (home, ours)
    return found


class PathFinder(MetaPathFinder, Loader):
    """Creates the modules of the table, under a package's name."""

    def __init__(self, package: str, home: str) -> None:
        """`home`: the package in which their names are defined."""
        self.package, self._home = package, home

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        inside = name.removeprefix(f"{self.package}.")
        if inside == name or inside not in PATHS:
            return None
        is_package = any(other.startswith(f"{inside}.") for other in PATHS)
        return ModuleSpec(name, self, origin="vLLM's module paths", is_package=is_package)

    def create_module(self, spec: ModuleSpec) -> None:
        """Use the default module."""
        return

    def exec_module(self, module: ModuleType) -> None:
        shown = names_of(module.__name__.removeprefix(f"{self.package}."))

        def get(name: str) -> Any:
            """Imported on first access: torch takes seconds to load."""
            if name not in shown:
                raise AttributeError(f"module {module.__name__!r} has no attribute {name!r}")
            module.__dict__[name] = found = self.lookup(*shown[name])
            return found

        module.__doc__ = f"vLLM's path for {', '.join(shown) or 'what is inside'}; see engine/vllm_api."
        module.__dict__.update(__getattr__=get, __all__=sorted(shown), __dir__=lambda: sorted(shown))

    def lookup(self, home: str, name: str) -> Any:
        """Look up a name in a module of ours."""
        return getattr(importlib.import_module(f"{self._home}.{home}"), name)


def install(package: str) -> None:
    """From now on `package` has the modules of the table, except where it has a file of that name."""
    finders = [finder for finder in sys.meta_path if isinstance(finder, PathFinder)]
    if package not in [finder.package for finder in finders]:
        sys.meta_path.append(PathFinder(package, package))
