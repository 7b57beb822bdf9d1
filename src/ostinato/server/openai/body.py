"""What all request bodies share: nothing is guessed, converted or ignored, and an extra that asks for nothing
is no extra."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, model_validator

Int64 = Annotated[int, Field(ge=-(2**63), le=2**63 - 1)]
Count = Annotated[int, Field(ge=1, le=2**31 - 1)]
TokenId = Annotated[int, Field(ge=0, le=2**31 - 1)]
TokenKey = Annotated[str, Field(pattern=r"^[0-9]{1,9}$")]
"""JSON has only text keys."""
# Of a long list, one wrong entry is told: a list of all of them takes seconds to make.
TokenIds = Annotated[list[TokenId], Field(min_length=1, fail_fast=True)]
Text = Annotated[str, Field(min_length=1)]
LogprobCount = Annotated[int, Field(ge=-1, le=2**31 - 1)]
"""How many of the likeliest tokens; -1: all. What the engine allows is checked later."""
Label = Annotated[str, Field(max_length=4096)]
"""Something of the caller's that changes nothing here."""

_AS_WITHOUT = {
    "background": False,
    "data_parallel_rank": 0,
    "disable_additional_properties": False,
    "disable_any_whitespace": False,
    "disable_fallback": False,
    "early_stopping": False,
    "echo": False,
    "embed_dtype": "float32",
    "endianness": "native",
    "function_call": "none",
    "include_reasoning": True,
    "length_penalty": 1.0,
    "no_logs": False,
    "no_stop_trim": False,
    "normalize": True,
    "priority": 0,
    "require_reasoning": False,
    "return_assistant_tokens_mask": False,
    "return_bytes": False,
    "return_cached_tokens_details": False,
    "return_entropy": False,
    "return_hidden_states": False,
    "return_meta_info": False,
    "return_prompt_text": False,
    "return_prompt_token_ids": False,
    "return_routed_experts": False,
    "return_sampling_mask": False,
    "return_spec_tokens_details": False,
    "return_token_offsets": False,
    "routed_dp_rank": 0,
    "routed_experts_prompt_start": 0,
    "routed_experts_start_len": 0,
    "separate_reasoning": False,
    "stream_reasoning": True,
    "truncation_side": "left",
    "use_beam_search": False,
}
"""Fields of the peers that are not here, and the value that asks for what is done anyway."""


class Body(BaseModel):
    """Strict. Fields that are not declared are refused by name, unless they are null, empty or ask for what
    is done anyway: clients fill in the fields they know."""

    model_config = ConfigDict(
        strict=True,
        extra="forbid",
        allow_inf_nan=False,
        json_schema_extra={"additionalProperties": {"enum": [None, "", [], {}]}},
    )

    @model_validator(mode="before")
    @classmethod
    def _without_empty_extras(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        known = {field.alias or name for name, field in cls.model_fields.items()}
        return {
            name: value for name, value in given.items() if name in known or not _asks_nothing(name, value)
        }


def _asks_nothing(name: str, value: Any) -> bool:
    if value is None or (isinstance(value, (str, list, dict)) and not value):
        return True
    default = _AS_WITHOUT.get(name)
    return default is not None and type(value) in (type(default), int) and value == default


REFUSALS = {
    "audio": "only text is made here",
    "background": "answers are not computed in the background: stream them",
    "chat_template": "it is for chats, /v1/chat/completions",
    "conversation": "conversations are not stored: send the earlier items in input",
    "custom_logit_processor": "programs of clients are not run: use logit_bias",
    "documents": "put them into a message",
    "echo": "the messages are not repeated in a chat: use /v1/completions",
    "function_call": "it is outdated: use tool_choice",
    "functions": "they are outdated: use tools",
    "guided_decoding_backend": "there is one",
    "guided_whitespace_pattern": "blank space in JSON cannot be chosen",
    "image_data": "only text is read here",
    "include_reasoning": "reasoning stays in the text, between its tags",
    "input_embeds": "only text and token ids are read here",
    "kv_transfer_params": "the KV cache is not handed to others",
    "lora_path": "name the adapter in model",
    "logits_processors": "programs of clients are not run: use logit_bias",
    "no_stop_trim": "use include_stop_str_in_output",
    "prediction": "predicted outputs are not used",
    "previous_response_id": "responses are not stored: send the earlier items in input",
    "priority": "requests are served first come, first served: 0 is the only one, as without vLLM's "
    "--scheduling-policy priority",
    "prompt": "prompts are not stored: send input",
    "prompt_embeds": "only text and token ids are read here",
    "return_hidden_states": "use /v1/embeddings",
    "separate_reasoning": "reasoning stays in the text, between its tags",
    "session_params": "sessions are not stored: send the whole prompt, its beginning is cached",
    "suffix": "text is not filled in: only completed",
    "thinking_token_budget": "thinking is not counted by itself: use max_tokens",
    "truncation_side": "prompts are cut to their last tokens",
    "use_beam_search": "there is no beam search: use n",
    "web_search_options": "there is no web search",
}
"""Why a field is not there, or what to use instead."""
