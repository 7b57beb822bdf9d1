"""Request bodies. What is not declared here is refused by name; null is the same as absent."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from .body import Body, Count, Int64, Label, LogprobCount, Text, TokenId, TokenIds, TokenKey
from .conversation import AllowedTools, Messages, Tool, ToolChoice
from .shapes import Choices, Grammar, Regex, ResponseFormat, Schema, StructuredOutputsField

MAX_N = 128
MAX_INPUTS = 2048
"""Texts of a request that are only read, as with OpenAI: clients divide what they have by it."""
RequestId = Annotated[str, Field(pattern=r"^[A-Za-z0-9._:\-]{1,128}$")]
Metadata = dict[str, Any]
Template = Annotated[str, Field(min_length=1, max_length=65536)]
BadWord = Annotated[str, Field(min_length=1, max_length=1024)]


class StreamOptions(Body):
    """What a stream carries besides its text."""

    include_usage: bool = False
    """End with a chunk that has the usage."""
    continuous_usage_stats: bool = False
    """Give the usage so far with every chunk."""
    include_obfuscation: bool = False
    """Random padding against onlookers; there is none here."""


class Sampling(Body):
    """Fields of completions and chat alike: OpenAI's, those that are only labels, and what vLLM and SGLang
    have beside them."""

    model: str | None = None
    """The served model; default: the one there is."""
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    n: Annotated[int, Field(ge=1, le=MAX_N)] | None = None
    stop: Text | Annotated[list[Text], Field(max_length=16)] | None = None
    seed: Int64 | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    logit_bias: dict[TokenKey, Annotated[float, Field(ge=-100, le=100)]] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    """What the text must look like."""
    best_of: Count | None = None
    """Only the value of n: no completions are made to be thrown away."""

    user: Label | None = None
    """This and the next ones change nothing."""
    store: bool | None = None
    """Nothing is stored, whatever is said."""
    metadata: Metadata | None = None
    service_tier: Label | None = None
    prompt_cache_key: Label | None = None
    prompt_cache_retention: Label | None = None
    safety_identifier: Label | None = None
    session_id: Label | None = None
    reasoning_effort: Label | None = None
    """Chat templates that know the variable get it."""

    top_k: Annotated[int, Field(ge=-1, le=2**31 - 1)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=100)] | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=64)] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    """Changes nothing: special tokens stand in the text as they are."""
    ignore_eos: bool | None = None
    min_tokens: Annotated[int, Field(ge=0, le=2**31 - 1)] | None = None
    allowed_token_ids: TokenIds | None = None
    """Only these may come."""
    bad_words: Annotated[list[BadWord], Field(max_length=1024)] | None = None
    """Words that may not come: the last token of one is forbidden behind its others."""
    structured_outputs: StructuredOutputsField | None = None
    """vLLM's name of response_format; the next ones are older names of its parts, and SGLang's."""
    guided_json: Schema | None = None
    guided_regex: Regex | None = None
    guided_choice: Choices | None = None
    guided_grammar: Grammar | None = None
    regex: Regex | None = None
    ebnf: Grammar | None = None
    prompt_logprobs: LogprobCount | None = None
    """Log probabilities of the prompt's tokens, with this many of the likeliest; -1: with all."""
    logprob_token_ids: Annotated[TokenIds, Field(max_length=1024)] | None = None
    """With logprobs: those of these tokens, instead of the likeliest."""
    vllm_xargs: dict[str, str | int | float | list[str | int | float]] | None = None
    """What the server's own logits processors are to know (`--logits-processors`)."""
    truncate_prompt_tokens: Annotated[int, Field(ge=-1, le=2**31 - 1)] | None = None
    """Cut the prompt to its last tokens; -1: to what leaves room for the answer."""
    cache_salt: Annotated[str, Field(min_length=1, max_length=1024)] | None = None
    """Only requests with the same one find each other's prompts in the prefix cache."""
    return_token_ids: bool | None = None
    """Give the token ids of prompt and answers beside the text."""
    return_tokens_as_token_ids: bool | None = None
    """With logprobs: call tokens `token_id:17`, whatever their text is."""
    request_id: RequestId | None = None
    """The end of the answer's id."""
    rid: RequestId | None = None
    """The answer's id."""


class CompletionRequest(Sampling):
    """The body of `/v1/completions`."""

    prompt: (
        str
        | Annotated[list[str], Field(min_length=1, max_length=256)]
        | TokenIds
        | Annotated[list[TokenIds], Field(min_length=1, max_length=256, fail_fast=True)]
    )
    max_tokens: Annotated[int, Field(ge=0, le=2**31 - 1)] | None = None
    logprobs: LogprobCount | None = None
    echo: bool | None = None
    add_special_tokens: bool | None = None
    """Whether the tokenizer puts its special tokens around the prompt; it does."""


class ChatRequest(Sampling):
    """The body of `/v1/chat/completions`."""

    messages: Messages
    max_completion_tokens: Count | None = None
    max_tokens: Count | None = None
    """The older name of max_completion_tokens."""
    logprobs: bool | None = None
    top_logprobs: LogprobCount | None = None
    tools: Annotated[list[Tool], Field(max_length=128)] | None = None
    tool_choice: Literal["auto", "none", "required"] | ToolChoice | AllowedTools | None = None
    parallel_tool_calls: bool | None = None
    """Whether an answer may call several functions; it may."""
    modalities: Annotated[list[Literal["text"]], Field(max_length=16)] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    """Go on with the last message instead of answering it."""
    add_special_tokens: Literal[False] | None = None
    """The chat template writes those that belong there."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Further variables for the chat template, such as enable_thinking."""
    chat_template: Template | None = None
    """A template instead of the model's, where the server trusts clients with it."""


class EmbeddingRequest(Body):
    """The body of `/v1/embeddings`."""

    input: (
        Text
        | Annotated[list[Text], Field(min_length=1, max_length=MAX_INPUTS)]
        | TokenIds
        | Annotated[list[TokenIds], Field(min_length=1, max_length=MAX_INPUTS, fail_fast=True)]
    )
    model: str | None = None
    encoding_format: Literal["float", "base64"] | None = None
    user: Label | None = None
    add_special_tokens: bool | None = None
    """Whether the tokenizer puts its special tokens around the inputs; it does."""
    dimensions: Count | None = None
    """Give the first so many numbers of each vector, at length 1 again."""
    truncate_prompt_tokens: Annotated[int, Field(ge=-1, le=2**31 - 1)] | None = None
    """Cut inputs to their last tokens; -1: to what the model takes."""
    pooling: Literal["last", "mean"] | None = None
    """Which hidden states make the vector: the last token's, or the mean of all; default: as the model's
    directory says, else the last."""


class TokenizeRequest(Body):
    """The body of `/tokenize`: a prompt, or a conversation as the chat template writes it."""

    model: str | None = None
    prompt: str | None = None
    add_special_tokens: bool | None = None
    """Whether the tokenizer puts its special tokens around the prompt; it does. In a conversation the
    template writes them."""
    return_token_strs: bool | None = None
    """Give each token as it stands in the vocabulary too."""
    messages: Messages | None = None
    """The next ones belong to it, as in a chat."""
    tools: Annotated[list[Tool], Field(max_length=128)] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: Label | None = None
    chat_template: Template | None = None


class DetokenizeRequest(Body):
    """The body of `/detokenize`."""

    model: str | None = None
    tokens: Annotated[list[TokenId], Field(fail_fast=True)]
    skip_special_tokens: bool = False


class AbortRequest(Body):
    """The body of `/abort`: one request by the id of its answer, or all."""

    request_id: str | None = None
    all: bool = False


class AbortRequests(Body):
    """The body of `/abort_requests`."""

    request_ids: Annotated[list[str], Field(max_length=65536)] | None = None
    """None, or an empty list: all."""


class SleepOptions(Body):
    """Of Ray's `/sleep`."""

    level: int | None = None
    mode: str | None = None


class SleepRequest(Body):
    """Ray's; vLLM has a query instead."""

    model: str | None = None
    options: SleepOptions | None = None


class WakeOptions(Body):
    """Of Ray's `/wakeup`."""

    tags: list[str] | None = None


class WakeRequest(Body):
    """Ray's; vLLM has a query instead."""

    model: str | None = None
    options: WakeOptions | None = None
