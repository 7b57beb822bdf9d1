"""`/v1/chat/completions`: a conversation in, answers out, with tool calls read from the text."""

from __future__ import annotations

from dataclasses import dataclass, field
from secrets import token_hex
from typing import Any

import msgspec

from .completion import Completion, Piece
from .completions import OnToken, usage_of_chunks
from .conversation import AssistantMessage
from .cost import check_arguments, check_lists
from .errors import ApiError
from .generation import Generation
from .logprobs import chat_logprobs, prompt_logprobs
from .requests import ChatRequest
from .responses import (
    AnswerMetrics,
    ChatBody,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatDelta,
    ChatLogprobs,
    ChatMessage,
    FunctionCall,
    Metadata,
    ToolCall,
)
from .sampling import bad_words, sampling_params
from .served_model import ServedModel
from .stream_events import ChunkEvents
from .structured import answer_shape
from .tool_calls.call_reader import CallPiece
from .tool_calls.forced import ForcedToolCall
from .tool_calls.formats import parser_for
from .tool_calls.llama import LlamaToolCalls
from .tool_calls.parser import Parsed, ToolCallParser
from .tool_use import ToolUse


async def answers_of(
    body: ChatRequest, model: ServedModel, use: ToolUse, wakes_every: int, on_token: OnToken
) -> list[Completion]:
    """The answers that a request asks for, not started yet."""
    asked = _asked_tokens(body)
    if body.top_logprobs and not body.logprobs:
        raise ApiError(400, "top_logprobs needs logprobs to be true", param="top_logprobs")
    if body.prompt_logprobs is not None and body.stream:
        raise ApiError(400, "prompt_logprobs are not part of a stream", param="prompt_logprobs")
    check_lists(body, body.n or 1)
    check_arguments(
        call.function.arguments
        for message in body.messages
        if isinstance(message, AssistantMessage)
        for call in message.tool_calls or ()
    )
    param, shape = answer_shape(body, use, model.tool_call_kind)
    ids = await model.encode_chat(
        body.messages,
        use.tools,
        add_generation_prompt=body.add_generation_prompt,
        continues=bool(body.continue_final_message),
        variables=body.chat_template_kwargs,
        reasoning_effort=body.reasoning_effort,
        template=body.chat_template,
        is_prompt=body.truncate_prompt_tokens is None,
    )
    ids = model.checked_prompt(model.cut(ids, body.truncate_prompt_tokens, asked or 1), "messages")
    name = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
    params = sampling_params(
        body,
        max_tokens=model.checked_max_tokens(asked, len(ids), name),
        model=model,
        bad_words=await bad_words(body, model),
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        prompt_logprobs=body.prompt_logprobs,
        shape=shape,
    )
    return [
        Completion(
            number,
            ids,
            params,
            model,
            number=number,
            shape_param=param,
            cache_salt=body.cache_salt,
            wakes_every=wakes_every,
            on_token=on_token,
        )
        for number in range(body.n or 1)
    ]


def _asked_tokens(body: ChatRequest) -> int | None:
    """The longest answer that is wanted."""
    older, newer = body.max_tokens, body.max_completion_tokens
    if older is not None and newer is not None and older != newer:
        message = "max_tokens is the older name of max_completion_tokens: give one of them"
        raise ApiError(400, message, param="max_tokens")
    return older if newer is None else newer


@dataclass
class Answer:
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


def call_parser(use: ToolUse, kind: str) -> ToolCallParser | None:
    """What reads the calls of one answer; None where there can be none."""
    if use.chosen is not None:
        return ForcedToolCall(use.chosen.function.name)
    if use.is_required:
        return LlamaToolCalls(use.names)
    if not use.tools or kind == "none":
        return None
    return parser_for(kind, use.names)


class ChatWriter(ChunkEvents):
    """Writes the answer of one request, at once or in chunks."""

    def __init__(self, body: ChatRequest, generation: Generation, model: ServedModel, use: ToolUse) -> None:
        self._body = body
        self._generation = generation
        self._model = model
        self._usage_told = False
        self._prompt_told = not body.return_token_ids
        self._answers = [
            Answer(completion, call_parser(use, model.tool_call_kind))
            for completion in generation.completions
        ]

    def whole(self) -> bytes:
        """The answer, when the generation is finished."""
        generation = self._generation
        choices = [self._choice(answer) for answer in self._answers]
        body = ChatBody(generation.id, generation.created, self._model.name, choices, generation.usage)
        body.metadata = Metadata(generation.weight_version)
        body.metrics = self._model.draft_metrics.of(generation.drafts)
        first = generation.completions[0]
        if self._body.prompt_logprobs is not None:
            body.prompt_logprobs = prompt_logprobs(
                self._model.need_token_texts(), len(first.prompt_ids), first.prompt_logprobs
            )
        if self._body.return_token_ids:
            body.prompt_token_ids = first.prompt_ids
        return msgspec.json.encode(body)

    def chunks(self) -> list[bytes]:
        """What has come since the last time."""
        wants_usage, usage = usage_of_chunks(self._body, self._generation)
        chunks = []
        for answer in self._answers:
            if not answer.has_ended:
                chunks += [self._encoded([choice], usage) for choice in self._chunk_choices(answer)]
        if wants_usage and not self._usage_told and self._generation.is_finished:
            self._usage_told = True
            metrics = self._model.draft_metrics.of(self._generation.drafts)
            chunks.append(self._encoded([], self._generation.usage, metrics))
        return chunks

    def _choice(self, answer: Answer) -> ChatChoice:
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
        choice = ChatChoice(
            answer.completion.index,
            message,
            self._logprobs(piece),
            answer.finish_reason,
            answer.completion.stop_reason,
        )
        if self._body.return_token_ids:
            choice.token_ids = piece.token_ids
        return choice

    def _chunk_choices(self, answer: Answer) -> list[ChatChunkChoice]:
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
        if self._body.return_token_ids and piece.token_ids:
            if not choices:
                choices.append(ChatChunkChoice(completion.index, ChatDelta()))
            choices[-1].token_ids = piece.token_ids
        return choices

    def _logprobs(self, piece: Piece) -> ChatLogprobs | None:
        if not self._body.logprobs or not piece.logprobs:
            return None
        top = -1 if self._body.logprob_token_ids else self._body.top_logprobs or 0
        shown = self._model.shown_tokens(self._body.return_tokens_as_token_ids)
        return chat_logprobs(shown, piece.logprobs, top)

    def _encoded(
        self,
        choices: list[ChatChunkChoice],
        usage: Any,
        metrics: AnswerMetrics | msgspec.UnsetType = msgspec.UNSET,
    ) -> bytes:
        generation = self._generation
        chunk = ChatChunk(generation.id, generation.created, self._model.name, choices, usage, metrics)
        if choices and choices[0].finish_reason is not None:
            chunk.metadata = Metadata(generation.completions[choices[0].index].weight_version)
        if not self._prompt_told:
            self._prompt_told = True
            chunk.prompt_token_ids = generation.completions[0].prompt_ids
        return msgspec.json.encode(chunk)
