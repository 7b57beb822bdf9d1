"""Which graphs the steps of a model have, and which kernels each of them runs."""

import math
from collections.abc import Hashable, Sequence
from dataclasses import replace

from ostinato.graphs import BatchDescriptor, GraphKey, GraphMode, capture_keys
from ostinato.kernels.attention.backend import AttentionBackend
from ostinato.kernels.attention.choice import Queries, query_class
from ostinato.kernels.gpu import gpu_of
from ostinato.kernels.linear import products
from ostinato.kernels.variants import kernel_class
from ostinato.models.config import ModelConfig
from ostinato.models.transformer import Transformer

from ..resolved_config import ResolvedConfig
from . import shared_prefix
from .step_inputs import max_context

LAST_TOKENS = "last tokens"
"""`BatchDescriptor.extra` of graphs whose last layer continues only with the last token of each request."""
_LEAST_TOKENS = 1024
_TIMES_REQUESTS = 4
"""From this many tokens on, and this many times the maximum number of requests, the last layer is much
shorter that way: a 32nd of all products of Llama-3.1-8B. Below, a layer takes as long as reading its
weights."""


class PlannedGraphs:
    """The list of graphs, known before any of them is captured."""

    def __init__(
        self,
        model: Transformer,
        attention: AttentionBackend,
        config: ResolvedConfig,
        mode: GraphMode,
        of_drafts: Sequence[GraphKey] | None,
    ) -> None:
        """`of_drafts`: graphs that verify drafts; None: there are no drafts."""
        self._model, self._config = model, config
        self._tokens_alone: frozenset[int] = frozenset()
        """Token counts that have graphs for a single request, see `_keys_alone`."""
        asked = config.config
        keys = capture_keys(
            mode,
            config.decode_ladder,
            config.token_ladder,
            max_reqs=config.max_running_requests,
            lora_cases=config.lora_cases,
            context_buckets=config.context_buckets,
            cascade=asked.enable_cascade_attention
            and attention.reads_prefix_once
            and has_whole_contexts(model.config, config),
        )
        keys = [
            key
            for key in keys
            if not key.descriptor.cascade or key.descriptor.num_reqs >= shared_prefix.LEAST_REQUESTS
        ]
        self.most_with_all_states: float = math.inf
        """Steps of more tokens use graphs of `LAST_TOKENS`, unless someone needs all states."""
        if asked.batch_invariant:
            keys = [key for key in keys if not key.descriptor.is_uniform]
        elif of_drafts is None:
            keys += self._keys_alone(keys, attention)
            if model.config.has_lm_head:
                keys = self._keys_of_last_tokens(keys)
        self.keys = [*keys, *(of_drafts or ())]

    def _keys_alone(self, keys: Sequence[GraphKey], attention: AttentionBackend) -> list[GraphKey]:
        """Graphs for a few tokens of a single request, such as the end of a prompt that is otherwise cached.

        Such tokens lie like those of a request whose drafts are verified, and for these there is a kernel
        that reads the context once; tokens of several requests are packed instead. With drafts there are no
        such graphs: drafters that take hidden states from steps were never measured with them.
        """
        model = self._model.config
        if attention.most_places is None:
            return []
        most = attention.most_places(
            model.num_heads, model.num_kv_heads, model.head_dim, self._config.dtype, self._config.device
        )
        few = [
            key
            for key in keys
            if key.mode is GraphMode.FULL
            and not key.descriptor.is_uniform
            and key.descriptor.num_tokens <= most
        ]
        self._tokens_alone = frozenset(key.descriptor.num_tokens for key in few)
        return [key._replace(descriptor=replace(key.descriptor, num_reqs=1)) for key in few]

    def _keys_of_last_tokens(self, keys: Sequence[GraphKey]) -> list[GraphKey]:
        """Adds graphs for long prompts whose last layer computes only the last tokens.

        Of the graphs that compute all of it, for prompt logprobs and embeddings, only the largest and those
        for powers of two stay: they are rarely used, and each costs a capture. Without padding all of them
        stay.
        """
        long = [
            key
            for key in keys
            if key.mode is GraphMode.FULL
            and not key.descriptor.is_uniform
            and key.descriptor.num_tokens >= max(_LEAST_TOKENS, _TIMES_REQUESTS * key.descriptor.num_reqs)
        ]
        if not long:
            return list(keys)
        sizes = {key.descriptor.num_tokens for key in long}
        mixed = {key.descriptor.num_tokens for key in keys if not key.descriptor.is_uniform}
        self.most_with_all_states = max(mixed - sizes, default=0)
        dropped = {key for key in long if not _is_power_of_2(key.descriptor.num_tokens)}
        dropped -= {key for key in long if key.descriptor.num_tokens == max(sizes)}
        if self._config.config.disable_cuda_graph_padding:
            dropped = set()
        of_last_tokens = [key._replace(descriptor=replace(key.descriptor, extra=LAST_TOKENS)) for key in long]
        return [*of_last_tokens, *(key for key in keys if key not in dropped)]

    def has_equal_places(self, descriptor: BatchDescriptor) -> bool:
        """Whether the places of each request's tokens follow from the request's number."""
        is_alone = descriptor.num_reqs == 1 and descriptor.num_tokens in self._tokens_alone
        return descriptor.is_uniform or is_alone

    def kernels_of(self, key: GraphKey) -> Hashable:
        """Equal for graphs that run the same compiled kernels."""
        num_tokens, query_len = key.descriptor.num_tokens, key.descriptor.query_len
        is_decode, device = query_len is not None, self._config.device
        if device.type != "cuda":
            return key.mode, query_len, key.descriptor.cascade, key.descriptor.lora
        # When drafts are verified, every token has logits.
        num_predicted = key.descriptor.num_reqs if query_len is None else num_tokens
        kernels = kernel_class(
            self._model.products_of(num_tokens, num_predicted),
            num_tokens,
            self._model.config.num_heads,
            self._model.config.num_kv_heads,
            self._config.dtype,
            device,
            is_decode=is_decode,
            is_cascade=key.descriptor.cascade,
            num_slots=key.descriptor.lora,
            query_len=query_len or 1,
        )
        if key.descriptor.extra == LAST_TOKENS:
            kernels = kernels, self._kernels_of_last_tokens(key.descriptor)
        queries = queries_of(self._model.config, self._config, key.descriptor)
        attention = None if query_len == 1 else query_class(queries, gpu_of(device))
        if query_len is None and self.has_equal_places(key.descriptor):
            attention = num_tokens, self._config.dtype
        return key.mode, query_len, kernels, attention

    def _kernels_of_last_tokens(self, descriptor: BatchDescriptor) -> Hashable:
        """The kernels of a decode step without its head."""
        model, count = self._model.config, descriptor.num_reqs
        heads = model.num_heads, model.num_kv_heads
        of_model, on = self._model.products_of(count, count), (self._config.dtype, self._config.device)
        return kernel_class(of_model, count, *heads, *on, is_decode=True, num_slots=descriptor.lora)

    def warmed_with(self, key: GraphKey) -> Hashable:
        """Equal for graphs that can share one warm-up; with and without adapters count as the same.

        A warm-up prepares only libraries and attention, which are the same; kernels were compiled before.
        """
        return self.kernels_of(key._replace(descriptor=replace(key.descriptor, lora=0)))

    def widens(self, key: GraphKey) -> bool:
        """Whether its gates and ups are stored as tensors: the largest of a step, where they occur."""
        of, config = key.descriptor, self._config
        return any(
            products.widens(shape, of.num_tokens, config.dtype, config.device, adapted=bool(of.lora))
            for shape in self._model.matrix_shapes
            if shape.gated
        )


def _is_power_of_2(number: int) -> bool:
    return number.bit_count() == 1


def has_whole_contexts(model: ModelConfig, config: ResolvedConfig) -> bool:
    """Whether a layer exists in which a token sees everything before it."""
    return any(window is None or window >= config.max_model_len for window in model.layer_windows)


def queries_of(model: ModelConfig, config: ResolvedConfig, descriptor: BatchDescriptor) -> Queries:
    """What attention knows about a prompt or a mixed batch."""
    return Queries(
        dtype=config.dtype,
        num_tokens=descriptor.num_tokens,
        num_requests=descriptor.num_reqs,
        max_query_len=descriptor.query_len or descriptor.num_tokens,
        max_context=max_context(config, descriptor),
        num_heads=model.num_heads,
        num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
    )
