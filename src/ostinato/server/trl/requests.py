"""Bodies of the endpoints of `trl vllm-serve`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from ..openai.body import Body, Int64, LogprobCount, Text, TokenId, TokenIds, TokenKey
from ..openai.conversation import Messages, Tool
from ..openai.requests import MAX_N, BadWord
from ..openai.shapes import Regex, StructuredOutputsField

MAX_PROMPTS = 4096
_Number = Annotated[int, Field(ge=1, le=MAX_N)]
_Tokens = Annotated[int, Field(ge=1, le=2**31 - 1)]
_Temperature = Annotated[float, Field(ge=0, le=2)]
_TopP = Annotated[float, Field(gt=0, le=1)]
_TopK = Annotated[int, Field(ge=-1, le=2**31 - 1)]
_MinP = Annotated[float, Field(ge=0, le=1)]
_Repetition = Annotated[float, Field(gt=0, le=100)]
_Penalty = Annotated[float, Field(ge=-2, le=2)]
_Kept = Annotated[int, Field(ge=-1, le=2**31 - 1)]


class GenerationKwargs(Body):
    """`generation_kwargs`: fields of vLLM's SamplingParams, which go before those of the body."""

    n: _Number | None = None
    max_tokens: _Tokens | None = None
    min_tokens: Annotated[int, Field(ge=0, le=2**31 - 1)] | None = None
    temperature: _Temperature | None = None
    top_p: _TopP | None = None
    top_k: _TopK | None = None
    min_p: _MinP | None = None
    repetition_penalty: _Repetition | None = None
    presence_penalty: _Penalty | None = None
    frequency_penalty: _Penalty | None = None
    seed: Int64 | None = None
    stop: Text | Annotated[list[Text], Field(max_length=16)] | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=64)] | None = None
    bad_words: Annotated[list[BadWord], Field(max_length=1024)] | None = None
    allowed_token_ids: TokenIds | None = None
    logit_bias: dict[TokenKey, Annotated[float, Field(ge=-100, le=100)]] | None = None
    include_stop_str_in_output: bool | None = None
    """Changes nothing about the token ids, and no text is told."""
    skip_special_tokens: bool | None = None
    ignore_eos: bool | None = None
    logprobs: LogprobCount | None = None
    structured_outputs: StructuredOutputsField | None = None
    truncate_prompt_tokens: _Kept | None = None


class Rollout(Body):
    """How to sample, with TRL's own defaults: those of the model's generation_config.json do not count."""

    n: _Number = 1
    repetition_penalty: _Repetition = 1.0
    temperature: _Temperature = 1.0
    top_p: _TopP = 1.0
    top_k: _TopK = -1
    min_p: _MinP = 0.0
    max_tokens: _Tokens = 16
    logprobs: LogprobCount | None = 0
    """How many of the likeliest tokens are told beside the sampled one; null: nothing is."""
    truncate_prompt_tokens: _Kept | None = None
    """Up to TRL 0.29."""
    structured_outputs_regex: Regex | None = None
    generation_kwargs: GenerationKwargs | None = None

    @model_validator(mode="before")
    @classmethod
    def _is_of_a_client_that_reads_the_answer(cls, given: Any) -> Any:
        """TRL before 0.29 cannot say how many logprobs it wants, and reads them in another shape."""
        old = {"guided_decoding_regex", "truncate_prompt_tokens"}
        if isinstance(given, dict) and "logprobs" not in given and old & given.keys():
            raise ValueError("this is a body of TRL before 0.29, which reads other answers: use a newer one")
        return given


class GenerateRequest(Rollout):
    """Of `/generate/`."""

    prompts: (
        Annotated[list[str], Field(min_length=1, max_length=MAX_PROMPTS)]
        | Annotated[list[TokenIds], Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True)]
    )
    images: Annotated[list[None], Field(max_length=MAX_PROMPTS)] | None = None
    """None, or a null for each prompt: only text is read here."""


class ChatRequest(Rollout):
    """Of `/chat/`."""

    messages: Annotated[list[Messages], Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True)]
    chat_template_kwargs: dict[str, Any] | None = None
    tools: Annotated[list[Tool], Field(max_length=128)] | None = None


class SequenceLogprobsRequest(Body):
    """Of `/get_sequence_logprobs/`."""

    sequences: Annotated[list[TokenIds], Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True)]
    """Prompts with their completions."""
    prompt_lengths: Annotated[list[Annotated[int, Field(ge=0)]], Field(max_length=MAX_PROMPTS)]
    """From where in each on log probabilities are told."""
    top_logprobs: Annotated[int, Field(ge=0, le=2**31 - 1)] = 100
    temperature: Annotated[float, Field(gt=0, le=2)] = 1.0
    """Changes nothing, as in vLLM: those of a prompt are the model's own."""
    response_format: Literal["json", "binary"] = "json"


class CommunicatorRequest(Body):
    """Of `/init_communicator/`."""

    host: Text
    port: int
    world_size: int
    client_device_uuid: str | None = None


class ParameterRequest(Body):
    """Of `/update_named_param/`."""

    name: Text
    dtype: str
    shape: list[int]
