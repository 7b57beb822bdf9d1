"""The arguments of vLLM's calls about a trainer's weights, as objects; dictionaries work too."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class WeightTransferInitRequest:
    """For `init_weight_transfer_engine`."""

    init_info: dict[str, Any] = field(default_factory=dict)


@dataclass
class WeightTransferUpdateRequest:
    """For `update_weights`: a part of an update."""

    update_info: dict[str, Any] = field(default_factory=dict)
