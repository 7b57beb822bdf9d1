"""Bodies of requests about weights, as SGLang's and vLLM's clients send them."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from ..openai.body import Body

Name = Annotated[str, Field(min_length=1, max_length=4096)]
Version = Annotated[str, Field(max_length=1024)]


class _Update(Body):
    """What SGLang's updates have in common."""

    weight_version: Version | None = None
    abort_all_requests: bool | None = None
    """End requests under way before."""
    flush_cache: bool | None = None
    """Changes nothing: prefixes that were computed with other weights are never used."""
    torch_empty_cache: bool | None = None
    """Changes nothing."""
    load_format: str | None = None


class DiskUpdate(_Update):
    """`/update_weights_from_disk`."""

    model_path: Name
    is_async: bool | None = None
    """Changes nothing: requests go on, and weights change between two steps."""
    keep_pause: bool | None = None
    """Changes nothing: what is paused stays so."""
    recapture_cuda_graph: bool | None = None
    """Changes nothing: graphs compute with the new weights as they are."""
    token_step: int | None = None
    """Changes nothing."""


class TensorsUpdate(_Update):
    """`/update_weights_from_tensor`."""

    serialized_named_tensors: list[str]
    """In base64, for each rank: of this engine one."""
    disable_draft_model: bool | None = None
    """Changes nothing: there is none."""


class BufferUpdate(_Update):
    """`/update_weights_from_ipc`."""

    zmq_handles: dict[Name, Name]
    """By the UUID of a GPU, where checkpoint-engine listens for the engine on it."""


class GroupUpdate(_Update):
    """`/update_weights_from_distributed`."""

    names: list[Name]
    dtypes: list[str]
    shapes: list[list[int]]
    group_name: Name = "weight_update_group"


class GroupMeeting(Body):
    """`/init_weights_update_group`."""

    master_address: Name
    master_port: int
    rank_offset: int
    world_size: int
    group_name: Name = "weight_update_group"
    backend: str = "nccl"


class GroupEnd(Body):
    """`/destroy_weights_update_group`."""

    group_name: Name = "weight_update_group"


class VersionUpdate(Body):
    """`/update_weight_version`."""

    new_version: Version
    abort_all_requests: bool | None = None


class WeightAsked(Body):
    """`/get_weights_by_name`."""

    name: Name
    truncate_size: int = 100


class WeightsCheck(Body):
    """`/weights_checker`."""

    action: str = "checksum"
    allow_quant_error: bool | None = None
    """Changes nothing: weights are not quantized."""


class TransferInit(Body):
    """`/init_weight_transfer_engine`."""

    init_info: dict[str, Any]


class TransferStart(Body):
    """`/start_weight_update`."""

    is_checkpoint_format: bool = True


class TransferPart(Body):
    """`/update_weights`."""

    update_info: dict[str, Any] | None = None
    weight_dir: Name | None = None
    """prime-rl's: a checkpoint's directory."""


class TransferEnd(Body):
    """`/finish_weight_update`."""

    weight_version: Version | None = None


class WorkerCall(Body):
    """`/collective_rpc`."""

    method: Name
    args: list[Any] | None = None
    kwargs: dict[str, Any] | None = None
    timeout: Annotated[float, Field(gt=0)] | None = None
