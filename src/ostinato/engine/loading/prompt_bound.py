"""The limit on prompt tokens per step while streams run, from `target_itl_ms`."""

from ostinato.graphs import GraphMode
from ostinato.models.config import ModelConfig

from ..resolved_config import ResolvedConfig
from ..scheduling.prompt_room import PromptBound
from ..scheduling.scheduler_config import window_of
from ..scheduling.step_costs import StepCosts


def prompt_bound_of(config: ResolvedConfig, model: ModelConfig) -> PromptBound | None:
    """None if no target is configured."""
    target = config.config.target_itl_ms
    if target is None:
        return None
    most = config.max_batched_tokens
    return PromptBound(
        target / 1e3,
        StepCosts(tokens_per_pair(model)),
        [*(size for size in config.token_ladder if size < most), most],
        are_captured=config.graph_mode.mixed is not GraphMode.NONE,
        window=window_of(model.layer_windows, config.max_model_len),
    )


def tokens_per_pair(model: ModelConfig) -> float:
    """Arithmetic per pair of query and key, as a fraction of that of all matrix products of a token."""
    attention = 2 * model.num_heads * model.head_dim
    projections = 2 * (model.num_heads + model.num_kv_heads) * model.head_dim
    return attention / (model.hidden_size * (projections + 3 * model.intermediate_size))
