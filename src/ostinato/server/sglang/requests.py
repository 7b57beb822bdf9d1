"""Bodies of SGLang's endpoints."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from ..openai.body import Body, Int64, Label, Text, TokenId, TokenIds, TokenKey
from ..openai.requests import MAX_N, RequestId
from ..openai.shapes import Grammar, Regex

DEFAULT_NEW_TOKENS = 128


class GenerateSampling(Body):
    """`sampling_params`."""

    max_new_tokens: Annotated[int, Field(ge=0, le=2**31 - 1)] | None = None
    min_new_tokens: Annotated[int, Field(ge=0, le=2**31 - 1)] | None = None
    n: Annotated[int, Field(ge=1, le=MAX_N)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=2**31 - 1)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=100)] | None = None
    logit_bias: dict[TokenKey, Annotated[float, Field(ge=-100, le=100)]] | None = None
    sampling_seed: Int64 | None = None
    stop: Text | Annotated[list[Text], Field(max_length=16)] | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=64)] | None = None
    no_stop_trim: bool | None = None
    """Keep the stop string at the end of the text."""
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    """Changes nothing, as in OpenAI's API here."""
    json_schema: Annotated[str, Field(min_length=1, max_length=65536)] | None = None
    regex: Regex | None = None
    ebnf: Grammar | None = None
    structural_tag: Annotated[str, Field(min_length=1, max_length=65536)] | None = None


class GenerateRequest(Body):
    """Prompts, as text or as token ids, and how to go on with them."""

    text: str | Annotated[list[str], Field(min_length=1, max_length=256)] | None = None
    input_ids: (
        TokenIds | Annotated[list[TokenIds], Field(min_length=1, max_length=256, fail_fast=True)] | None
    ) = None
    sampling_params: GenerateSampling | Annotated[list[GenerateSampling], Field(max_length=256)] | None = None
    """For all prompts, or one for each."""
    stream: bool | None = None
    rid: RequestId | None = None
    """The id of the answer; of several, what their ids begin with."""
    return_logprob: bool | None = None
    logprob_start_len: Annotated[int, Field(ge=-1, le=2**31 - 1)] | None = None
    """From where in the prompt log probabilities are wanted; -1: of the answer only."""
    top_logprobs_num: Annotated[int, Field(ge=0, le=20)] | None = None
    return_text_in_logprobs: bool | None = None
    lora_path: Text | Annotated[list[Text | None], Field(max_length=256)] | None = None
    """The name of an adapter that is loaded, for all prompts, or one or null for each."""
    log_metrics: bool | None = None
    """Changes nothing: metrics count all requests."""


class MemoryRequest(Body):
    """Of `/release_memory_occupation` and `/resume_memory_occupation`."""

    tags: Annotated[list[Text], Field(max_length=16)] | None = None
    """weights, kv_cache, cuda_graph; none: all."""


class PauseRequest(Body):
    """Of `/pause_generation`."""

    mode: Literal["abort", "retract", "in_place"] = "abort"


class ContinueRequest(Body):
    """Of `/continue_generation`."""

    torch_empty_cache: bool | None = None
    """Changes nothing: between two steps no memory is cached that others could use."""


class AbortRequest(Body):
    """Of `/abort_request`."""

    rid: str | None = None
    abort_all: bool = False
    abort_message: Label | None = None
