"""Writes a response, at once or as the events that the official client knows."""

from __future__ import annotations

from typing import Any

import msgspec

from ..chat import Answer
from ..errors import ApiError
from ..generation import Generation
from ..logprobs import chat_logprobs
from ..requests import ChatRequest
from ..responses import TokenLogprob
from ..served_model import ServedModel
from ..stream_events import event
from ..tool_calls.parser import ToolCallParser
from .as_chat import renamed
from .output import Event, Output
from .requests import ResponsesRequest


class ResponseWriter:
    """Writes the answer of one request."""

    end = b""
    """The last event says that it is the last."""

    def __init__(
        self,
        body: ResponsesRequest,
        chat: ChatRequest,
        generation: Generation,
        model: ServedModel,
        parser: ToolCallParser | None,
    ) -> None:
        self._body = body
        self._chat = chat
        self._generation = generation
        self._model = model
        [completion] = generation.completions
        self._answer = Answer(completion, parser)
        self._output = Output()
        self._logprobs: list[TokenLogprob] = []
        """Of tokens whose text is not there yet, such as half a character."""
        self._has_begun = False
        self._has_ended = False
        self._num_events = 0

    def whole(self) -> bytes:
        """The response, when the generation is finished."""
        self._grow()
        return msgspec.json.encode(self._response(*self._status))

    def events(self) -> list[bytes]:
        """What has come since the last time."""
        found: list[Event] = []
        if self._has_ended:
            return []
        if not self._has_begun:
            self._has_begun = True
            for name in ("created", "in_progress"):
                found.append({"type": f"response.{name}", "response": self._response("in_progress", None)})
        found += self._grow()
        if self._generation.is_finished:
            self._has_ended = True
            status, why = self._status
            kind = "completed" if status == "completed" else "incomplete"
            found.append({"type": f"response.{kind}", "response": self._response(status, why)})
        return [self._encoded(each) for each in found]

    def failure(self, error: ApiError) -> bytes:
        """The last event of a stream that went wrong."""
        said = renamed(error)
        return self._encoded(
            {"type": "error", "code": said.code, "message": str(said), "param": said.param},
        )

    def _grow(self) -> list[Event]:
        """Take in what has come; the events that tell of it."""
        piece = self._answer.completion.take()
        parsed = self._answer.parsed(piece.text)
        if self._chat.logprobs and piece.logprobs:
            texts = self._model.shown_tokens(self._chat.return_tokens_as_token_ids)
            top = -1 if self._chat.logprob_token_ids else self._chat.top_logprobs or 0
            self._logprobs += chat_logprobs(texts, piece.logprobs, top).content
        found: list[Event] = []
        is_over = self._generation.is_finished
        is_last_text = is_over and not parsed.calls and (bool(self._logprobs) or not self._output.items)
        if parsed.content or is_last_text:
            found += self._output.add_text(parsed.content, self._logprobs)
            self._logprobs = []
        for call in parsed.calls:
            found += self._output.add_call(call)
            self._logprobs = []
        if is_over:
            complete = self._status[0] == "completed"
            found += self._output.close("completed" if complete else "incomplete")
        return found

    @property
    def _status(self) -> tuple[str, str | None]:
        """How it ended, and why early."""
        reason = self._answer.completion.finish_reason
        if reason == "length":
            return "incomplete", "max_output_tokens"
        return ("completed", None) if reason == "stop" else ("cancelled", None)

    def _encoded(self, found: Event) -> bytes:
        self._num_events += 1
        return event(msgspec.json.encode({**found, "sequence_number": self._num_events - 1}), found["type"])

    def _response(self, status: str, why: str | None) -> dict[str, Any]:
        body, generation = self._body, self._generation
        usage = None
        if status != "in_progress":
            counted = generation.usage
            usage = {
                "input_tokens": counted.prompt_tokens,
                "input_tokens_details": {
                    "cached_tokens": counted.prompt_tokens_details.cached_tokens,
                    "cache_write_tokens": 0,
                },
                "output_tokens": counted.completion_tokens,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": counted.total_tokens,
            }
        params = self._answer.completion.params
        return {
            "id": generation.id,
            "object": "response",
            "created_at": generation.created,
            "status": status,
            "error": None,
            "incomplete_details": None if why is None else {"reason": why},
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "model": self._model.name,
            "output": [] if status == "in_progress" else self._output.items,
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": {"effort": body.reasoning.effort if body.reasoning else None, "summary": None},
            "service_tier": "default",
            "store": False,
            "temperature": params.temperature,
            "text": _text_options(body),
            "tool_choice": _dumped(body.tool_choice) or "auto",
            "tools": [{"strict": False, "parameters": None, **_dumped(tool)} for tool in body.tools or ()],
            "top_logprobs": body.top_logprobs or 0,
            "top_p": params.top_p,
            "truncation": "disabled",
            "usage": usage,
            "user": body.user,
            "metadata": body.metadata or {},
            "weight_version": generation.weight_version,
        }


def _text_options(body: ResponsesRequest) -> dict[str, Any]:
    given = _dumped(body.text) or {}
    return {"format": {"type": "text"}, **given}


def _dumped(given: Any) -> Any:
    """A field as it was sent."""
    return given.model_dump(exclude_none=True, by_alias=True) if hasattr(given, "model_dump") else given
