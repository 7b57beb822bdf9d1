"""Response bodies, encoded by msgspec: a chunk of a stream is built for every token."""

from __future__ import annotations

from typing import Literal

import msgspec


class CachedTokens(msgspec.Struct, frozen=True):
    """Of the prompt's tokens."""

    cached_tokens: int = 0
    """Found in the prefix cache."""


class Usage(msgspec.Struct, frozen=True):
    """What a request took."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens


class Metadata(msgspec.Struct, frozen=True):
    """Beside an answer, as SGLang has it."""

    weight_version: str
    """Of the weights that its last token was computed with."""


class AcceptedDrafts(msgspec.Struct, frozen=True):
    """What drafts brought one answer, under vLLM's names."""

    mean_acceptance_length: float
    """Tokens of a step that verified drafts."""
    draft_acceptance_rate: float
    """Share of drafts that were accepted."""
    acceptance_histogram: list[int]
    """In how many steps 0, 1, 2... drafts were accepted."""
    num_spec_steps: int
    num_accepted_draft_tokens: int
    num_draft_tokens: int
    num_spec_tokens: int
    """The most drafts of a step."""
    per_step_accepted: list[int] | msgspec.UnsetType = msgspec.UNSET
    per_step_drafted: list[int] | msgspec.UnsetType = msgspec.UNSET


class AnswerMetrics(msgspec.Struct, frozen=True):
    """Beside an answer, as vLLM has it."""

    speculative_decoding: AcceptedDrafts


class PromptLogprob(msgspec.Struct, frozen=True):
    """One token that is or could have been in a place of the prompt."""

    logprob: float
    rank: int | None
    decoded_token: str


PromptLogprobs = list[dict[int, PromptLogprob] | None]
"""For each token of the prompt but the first, by token id."""


class CompletionLogprobs(msgspec.Struct):
    """Log probabilities in the form of `/v1/completions`."""

    tokens: list[str] = []
    token_logprobs: list[float | None] = []
    top_logprobs: list[dict[str, float] | None] | None = []
    text_offset: list[int] = []


class CompletionChoice(msgspec.Struct):
    """One completion, or what a chunk adds to it."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET
    prompt_token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET
    prompt_logprobs: PromptLogprobs | msgspec.UnsetType = msgspec.UNSET


class CompletionBody(msgspec.Struct):
    """The answer of `/v1/completions`, and each chunk of its stream."""

    id: str
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | msgspec.UnsetType | None = msgspec.UNSET
    metrics: AnswerMetrics | msgspec.UnsetType = msgspec.UNSET
    metadata: Metadata | msgspec.UnsetType = msgspec.UNSET
    """In a stream, with the end of a completion."""
    object: Literal["text_completion"] = "text_completion"


class TopLogprob(msgspec.Struct, frozen=True):
    """One token that could have come."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(msgspec.Struct, frozen=True):
    """One token that came, and others that could have."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct):
    """Log probabilities in the form of `/v1/chat/completions`."""

    content: list[TokenLogprob]
    refusal: None = None


class FunctionCall(msgspec.Struct, omit_defaults=True):
    """A call; in a stream, what a chunk adds to it."""

    name: str | None = None
    arguments: str | None = None


class ToolCall(msgspec.Struct, omit_defaults=True):
    """A tool call; in a stream, `index` says which, and only the first piece has id and type."""

    function: FunctionCall
    index: int | None = None
    id: str | None = None
    type: str | None = None


class ChatMessage(msgspec.Struct):
    """The model's answer."""

    content: str | None
    tool_calls: list[ToolCall] | msgspec.UnsetType = msgspec.UNSET
    role: Literal["assistant"] = "assistant"
    refusal: None = None
    reasoning: None = None
    """Stays in the content; clients of vLLM and SGLang ask for it all the same, under one of its names."""
    reasoning_content: None = None


class ChatChoice(msgspec.Struct):
    """One answer."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET


class ChatBody(msgspec.Struct):
    """The answer of `/v1/chat/completions`."""

    id: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: PromptLogprobs | msgspec.UnsetType = msgspec.UNSET
    prompt_token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET
    metrics: AnswerMetrics | msgspec.UnsetType = msgspec.UNSET
    metadata: Metadata | msgspec.UnsetType = msgspec.UNSET
    object: Literal["chat.completion"] = "chat.completion"


class ChatDelta(msgspec.Struct, omit_defaults=True):
    """What a chunk adds to an answer."""

    role: str | None = None
    content: str | None = None
    tool_calls: list[ToolCall] | None = None


class ChatChunkChoice(msgspec.Struct):
    """What a chunk adds to one answer."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | msgspec.UnsetType | None = msgspec.UNSET
    token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET


class ChatChunk(msgspec.Struct):
    """One chunk of a chat stream."""

    id: str
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | msgspec.UnsetType | None = msgspec.UNSET
    metrics: AnswerMetrics | msgspec.UnsetType = msgspec.UNSET
    metadata: Metadata | msgspec.UnsetType = msgspec.UNSET
    """With the end of an answer."""
    prompt_token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET
    """With the beginning of the first one, where vLLM's clients look for them."""
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"


class EmbeddingUsage(msgspec.Struct, frozen=True):
    """What embedding took."""

    prompt_tokens: int
    total_tokens: int


class EmbeddingItem(msgspec.Struct, frozen=True):
    """One vector, as numbers or as base64 of little-endian float32."""

    index: int
    embedding: list[float] | str
    object: Literal["embedding"] = "embedding"


class EmbeddingBody(msgspec.Struct, frozen=True):
    """The answer of `/v1/embeddings`."""

    model: str
    data: list[EmbeddingItem]
    usage: EmbeddingUsage
    object: Literal["list"] = "list"


class ModelCard(msgspec.Struct, frozen=True):
    """One served model."""

    id: str
    created: int
    max_model_len: int
    object: Literal["model"] = "model"
    owned_by: str = "ostinato"
    root: str = ""
    """Where it was read from."""
    parent: str | None = None
    """Of an adapter: the model that it changes."""


class ModelList(msgspec.Struct, frozen=True):
    """The answer of `/v1/models`."""

    data: list[ModelCard]
    object: Literal["list"] = "list"


class TokenizeBody(msgspec.Struct, frozen=True):
    """The answer of `/tokenize`."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str | None] | msgspec.UnsetType = msgspec.UNSET
    """As they stand in the vocabulary; where they were asked for."""


class DetokenizeBody(msgspec.Struct, frozen=True):
    """The answer of `/detokenize`."""

    prompt: str
