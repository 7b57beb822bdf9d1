"""Request bodies. What is not declared here is refused by name; null is the same as absent."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

MAX_N = 128
Int64 = Annotated[int, Field(ge=-(2**63), le=2**63 - 1)]
Count = Annotated[int, Field(ge=1, le=2**31 - 1)]
TokenId = Annotated[int, Field(ge=0, le=2**31 - 1)]
TokenKey = Annotated[str, Field(pattern=r"^[0-9]{1,9}$")]
"""JSON has only text keys."""
TokenIds = Annotated[list[TokenId], Field(min_length=1)]
Text = Annotated[str, Field(min_length=1)]


class Body(BaseModel):
    """Strict: no field is guessed, converted or ignored."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)


class StreamOptions(Body):
    """What a stream carries besides its text."""

    include_usage: bool = False
    """End with a chunk that has the usage."""


class TextFormat(Body):
    """Free text."""

    type: Literal["text"]


class JsonObjectFormat(Body):
    """Any JSON object."""

    type: Literal["json_object"]


class JsonSchema(Body):
    """A schema with a name."""

    name: Text | None = None
    description: str | None = None
    schema_: Annotated[dict[str, Any], Field(alias="schema")]
    strict: bool | None = None
    """Schemas are always followed to the letter."""


class JsonSchemaFormat(Body):
    """JSON that a schema describes."""

    type: Literal["json_schema"]
    json_schema: JsonSchema


class RegexFormat(Body):
    """Text that a regular expression matches from beginning to end."""

    type: Literal["regex"]
    regex: Annotated[str, Field(min_length=1, max_length=2048)]


class GrammarFormat(Body):
    """Text of a context-free grammar in EBNF whose first rule is `root`."""

    type: Literal["grammar"]
    grammar: Annotated[str, Field(min_length=1, max_length=16384)]


ResponseFormat = Annotated[
    TextFormat | JsonObjectFormat | JsonSchemaFormat | RegexFormat | GrammarFormat,
    Field(discriminator="type"),
]


class Sampling(Body):
    """Fields of completions and chat alike; the second half are extensions that vLLM and SGLang share."""

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
    user: str | None = None
    """A label of the caller's; it changes nothing."""
    response_format: ResponseFormat | None = None
    """What the text must look like."""
    top_k: Annotated[int, Field(ge=-1, le=2**31 - 1)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=100)] | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=64)] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    ignore_eos: bool | None = None
    min_tokens: Annotated[int, Field(ge=0, le=2**31 - 1)] | None = None


class CompletionRequest(Sampling):
    """The body of `/v1/completions`."""

    prompt: (
        str
        | Annotated[list[str], Field(min_length=1, max_length=256)]
        | TokenIds
        | Annotated[list[TokenIds], Field(min_length=1, max_length=256)]
    )
    max_tokens: Annotated[int, Field(ge=0, le=2**31 - 1)] | None = None
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    echo: bool | None = None
    return_token_ids: bool | None = None
    """Give the token ids of each choice beside its text."""


class TextPart(Body):
    """A piece of a message. Only text is supported."""

    type: Literal["text"]
    text: str


Content = str | list[TextPart]


class SystemMessage(Body):
    """What the model is told first."""

    role: Literal["system"]
    content: Content
    name: str | None = None


class DeveloperMessage(Body):
    """The newer name of a system message."""

    role: Literal["developer"]
    content: Content
    name: str | None = None


class UserMessage(Body):
    """What the user says."""

    role: Literal["user"]
    content: Content
    name: str | None = None


class CalledFunction(Body):
    """A function the model called, with its arguments as JSON text."""

    name: Text
    arguments: str


class MadeToolCall(Body):
    """A tool call of an earlier answer."""

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction


class AssistantMessage(Body):
    """An earlier answer of the model."""

    role: Literal["assistant"]
    content: Content | None = None
    name: str | None = None
    refusal: None = None
    tool_calls: list[MadeToolCall] | None = None


class ToolMessage(Body):
    """What a tool answered."""

    role: Literal["tool"]
    content: Content
    tool_call_id: str


Message = Annotated[
    SystemMessage | DeveloperMessage | UserMessage | AssistantMessage | ToolMessage,
    Field(discriminator="role"),
]
Messages = Annotated[list[Message], Field(min_length=1)]


class FunctionDefinition(Body):
    """A function the model may call."""

    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.\-]{1,64}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    """A JSON schema of the arguments."""
    strict: Literal[False] | None = None
    """Arguments are not held to the schema yet."""


class Tool(Body):
    """Something the model may call."""

    type: Literal["function"]
    function: FunctionDefinition


class ChosenFunction(Body):
    """A function by its name."""

    name: str


class ToolChoice(Body):
    """The function that must be called."""

    type: Literal["function"]
    function: ChosenFunction


class ChatRequest(Sampling):
    """The body of `/v1/chat/completions`."""

    messages: Messages
    max_completion_tokens: Count | None = None
    max_tokens: Count | None = None
    """The older name of max_completion_tokens."""
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    tools: Annotated[list[Tool], Field(max_length=128)] | None = None
    tool_choice: Literal["auto", "none", "required"] | ToolChoice | None = None
    parallel_tool_calls: Literal[True] | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    """Further variables for the chat template, such as enable_thinking."""


class EmbeddingRequest(Body):
    """The body of `/v1/embeddings`."""

    input: (
        Text
        | Annotated[list[Text], Field(min_length=1, max_length=256)]
        | TokenIds
        | Annotated[list[TokenIds], Field(min_length=1, max_length=256)]
    )
    model: str | None = None
    encoding_format: Literal["float", "base64"] | None = None
    user: str | None = None
    pooling: Literal["last", "mean"] | None = None
    """Which hidden states make the vector: the last token's, or the mean of all."""


class TokenizeRequest(Body):
    """The body of `/tokenize`: a prompt, or a conversation as the chat template writes it."""

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    tools: Annotated[list[Tool], Field(max_length=128)] | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool = True


class DetokenizeRequest(Body):
    """The body of `/detokenize`."""

    model: str | None = None
    tokens: list[TokenId]
    skip_special_tokens: bool = False


class AbortRequest(Body):
    """The body of `/abort`: one request by the id of its answer, or all."""

    request_id: str | None = None
    all: bool = False
