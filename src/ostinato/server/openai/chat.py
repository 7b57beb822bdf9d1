"""`/v1/chat/completions`: a conversation in, answers out, with tool calls read from the text."""

from __future__ import annotations

from dataclasses import dataclass, field
from secrets import token_hex
from typing import Any

import msgspec

from .completion import Completion, Piece
from .completions import OnToken, seeded
from .errors import ApiError
from .generation import Generation
from .logprobs import chat_logprobs
from .requests import ChatRequest, ToolChoice
from .responses import (
    ChatBody,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatDelta,
    ChatLogprobs,
    ChatMessage,
    FunctionCall,
    ToolCall,
)
from .sampling import sampling_params
from .served_model import ServedModel
from .structured import forced_call
from .tool_calls.call_reader import CallPiece
from .tool_calls.forced import ForcedToolCall
from .tool_calls.formats import parser_for
from .tool_calls.llama import LlamaToolCalls
from .tool_calls.parser import Parsed, ToolCallParser


async def answers_of(
    body: ChatRequest, model: ServedModel, wakes_every: int, on_token: OnToken
) -> list[Completion]:
    """The answers that a request asks for, not started yet."""
    if body.max_tokens is not None and body.max_completion_tokens is not None:
        message = "max_tokens is the older name of max_completion_tokens: give one of them"
        raise ApiError(400, message, param="max_tokens")
    if body.top_logprobs and not body.logprobs:
        raise ApiError(400, "top_logprobs needs logprobs to be true", param="top_logprobs")
    if body.tool_choice is not None and not body.tools:
        raise ApiError(400, "tool_choice is given without tools", param="tool_choice")
    forced = forced_call(body)
    has_shape = body.response_format is not None and body.response_format.type != "text"
    if has_shape and body.tools and body.tool_choice != "none":
        message = "an answer with a response_format cannot be a tool call: set tool_choice to none"
        raise ApiError(400, message, param="response_format")
    tools = body.tools if body.tool_choice != "none" else None
    ids = await model.encode_chat(
        body.messages,
        tools,
        add_generation_prompt=body.add_generation_prompt is not False,
        variables=body.chat_template_kwargs,
    )
    model.checked_prompt(ids, "messages")
    name = "max_tokens" if body.max_tokens is not None else "max_completion_tokens"
    params = sampling_params(
        body,
        max_tokens=model.checked_max_tokens(body.max_completion_tokens or body.max_tokens, len(ids), name),
        ready=model.ready,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        prompt_logprobs=None,
        forced=forced,
    )
    return [
        Completion(number, ids, seeded(params, number), model, wakes_every=wakes_every, on_token=on_token)
        for number in range(body.n or 1)
    ]


@dataclass
class _Answer:
    """One answer as far as it has been written."""

    completion: Completion
    parser: ToolCallParser | None
    has_begun: bool = False
    has_ended: bool = False
    call_ids: list[str] = field(default_factory=list)

    def parsed(self, text: str) -> Parsed:
        if self.parser is None:
            return Parsed(text)
        parsed = self.parser.push(text)
        if self.completion.is_finished:
            rest = self.parser.finish()
            parsed.content += rest.content
            parsed.calls += rest.calls
        return parsed

    @property
    def finish_reason(self) -> str | None:
        reason = self.completion.finish_reason
        if reason == "stop" and self.parser is not None and self.parser.num_calls:
            return "tool_calls"
        return reason

    def tool_call(self, piece: CallPiece) -> ToolCall:
        """A piece of a call as a chunk carries it."""
        if piece.name is None:
            return ToolCall(FunctionCall(arguments=piece.arguments), index=piece.index)
        self.call_ids.append(f"call_{token_hex(12)}")
        function = FunctionCall(name=piece.name, arguments=piece.arguments)
        return ToolCall(function, index=piece.index, id=self.call_ids[-1], type="function")


def _parser(body: ChatRequest, kind: str) -> ToolCallParser | None:
    """What reads the calls of one answer; None where there can be none."""
    names = frozenset(tool.function.name for tool in body.tools or ())
    if isinstance(body.tool_choice, ToolChoice):
        return ForcedToolCall(body.tool_choice.function.name)
    if body.tool_choice == "required":
        return LlamaToolCalls(names)
    if not names or body.tool_choice == "none" or kind == "none":
        return None
    return parser_for(kind, names)


class ChatWriter:
    """Writes the answer of one request, at once or in chunks."""

    def __init__(
        self, body: ChatRequest, generation: Generation, model: ServedModel, tool_call_kind: str
    ) -> None:
        self._body = body
        self._generation = generation
        self._model = model
        self._usage_told = False
        self._answers = [
            _Answer(completion, _parser(body, tool_call_kind)) for completion in generation.completions
        ]

    def whole(self) -> bytes:
        """The answer, when the generation is finished."""
        generation = self._generation
        choices = [self._choice(answer) for answer in self._answers]
        body = ChatBody(generation.id, generation.created, self._model.name, choices, generation.usage)
        return msgspec.json.encode(body)

    def chunks(self) -> list[bytes]:
        """What has come since the last time."""
        wants_usage = self._body.stream_options is not None and self._body.stream_options.include_usage
        usage = None if wants_usage else msgspec.UNSET
        chunks = []
        for answer in self._answers:
            if not answer.has_ended:
                chunks += [self._encoded([choice], usage) for choice in self._chunk_choices(answer)]
        if wants_usage and not self._usage_told and self._generation.is_finished:
            self._usage_told = True
            chunks.append(self._encoded([], self._generation.usage))
        return chunks

    def _choice(self, answer: _Answer) -> ChatChoice:
        piece = answer.completion.take()
        parsed = answer.parsed(piece.text)
        calls: dict[int, ToolCall] = {}
        for part in parsed.calls:
            call = calls.get(part.index)
            if call is None:
                call = calls[part.index] = answer.tool_call(part)
                call.index = None
            else:
                call.function.arguments = (call.function.arguments or "") + part.arguments
        message = ChatMessage(parsed.content if parsed.content or not calls else None)
        if calls:
            message.tool_calls = list(calls.values())
        return ChatChoice(
            answer.completion.index,
            message,
            self._logprobs(piece),
            answer.finish_reason,
            answer.completion.stop_reason,
        )

    def _chunk_choices(self, answer: _Answer) -> list[ChatChunkChoice]:
        completion = answer.completion
        piece = completion.take()
        parsed = answer.parsed(piece.text)
        ends = completion.is_finished
        choices = []
        if not answer.has_begun and completion.num_received:
            answer.has_begun = True
            choices.append(ChatChunkChoice(completion.index, ChatDelta(role="assistant", content="")))
        if parsed.content or piece.logprobs:
            delta = ChatDelta(content=parsed.content)
            choices.append(ChatChunkChoice(completion.index, delta, self._logprobs(piece)))
        for part in parsed.calls:
            delta = ChatDelta(tool_calls=[answer.tool_call(part)])
            choices.append(ChatChunkChoice(completion.index, delta))
        if ends:
            answer.has_ended = True
            last = ChatChunkChoice(completion.index, ChatDelta(), finish_reason=answer.finish_reason)
            last.stop_reason = completion.stop_reason
            choices.append(last)
        return choices

    def _logprobs(self, piece: Piece) -> ChatLogprobs | None:
        if not self._body.logprobs or not piece.logprobs:
            return None
        return chat_logprobs(self._model.need_token_texts(), piece.logprobs, self._body.top_logprobs or 0)

    def _encoded(self, choices: list[ChatChunkChoice], usage: Any) -> bytes:
        generation = self._generation
        chunk = ChatChunk(generation.id, generation.created, self._model.name, choices, usage)
        return msgspec.json.encode(chunk)
