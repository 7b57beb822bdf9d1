"""A request for a response as the chat that it is."""

from __future__ import annotations

from typing import Any

from ostinato.text.messages import joined_parts

from ..errors import ApiError
from ..requests import ChatRequest, Sampling
from .requests import (
    AllowedFunctions,
    FunctionCallItem,
    FunctionOutputItem,
    Item,
    MessageItem,
    NamedFunction,
    NamedSchemaFormat,
    Parts,
    ResponsesRequest,
)

LOGPROBS = "message.output_text.logprobs"

_NAMES = {
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text",
    "logprobs": "include",
}


def renamed(error: ApiError) -> ApiError:
    """An error about a field of the chat, about the field that the client has sent."""
    error.param = _NAMES.get(error.param or "", error.param)
    return error


def as_chat(body: ResponsesRequest) -> ChatRequest:
    """The chat that a request is."""
    _check(body)
    shared = set(Sampling.model_fields) - {"n"}
    given = body.model_dump(include=shared, exclude_none=True, by_alias=True)
    given["messages"] = _messages(body)
    given["max_completion_tokens"] = body.max_output_tokens
    given["parallel_tool_calls"] = body.parallel_tool_calls
    given["chat_template_kwargs"] = body.chat_template_kwargs
    if body.reasoning is not None and body.reasoning.effort is not None:
        given["reasoning_effort"] = body.reasoning.effort
    if body.include is not None and LOGPROBS in body.include:
        given |= {"logprobs": True, "top_logprobs": body.top_logprobs}
    if body.tools:
        given["tools"] = [
            {"type": "function", "function": tool.model_dump(exclude={"type"}, exclude_none=True)}
            for tool in body.tools
        ]
    given["tool_choice"] = _tool_choice(body)
    if body.text is not None and body.text.format is not None:
        given["response_format"] = _format(body.text.format)
    return ChatRequest.model_validate(given)


def _check(body: ResponsesRequest) -> None:
    """400 for what a chat knows and a response would not show."""
    problem = None
    for name in ("prompt_logprobs", "return_token_ids"):
        if getattr(body, name) not in (None, False):
            problem = name, "a response has no place for them: use /v1/chat/completions"
    if body.top_logprobs and LOGPROBS not in (body.include or ()):
        problem = "top_logprobs", f"they need {LOGPROBS} in include"
    if body.response_format is not None and body.text is not None and body.text.format is not None:
        problem = "text", "its format and response_format say the same: give one of them"
    if body.stream_options is not None and body.stream_options.continuous_usage_stats:
        problem = "stream_options", "the usage of a response comes at its end"
    if problem is not None:
        raise ApiError(400, f"{problem[0]}: {problem[1]}", param=problem[0])


def _tool_choice(body: ResponsesRequest) -> Any:
    match body.tool_choice:
        case NamedFunction(name=name):
            return _function(name)
        case AllowedFunctions(mode=mode, tools=tools):
            allowed = {"mode": mode, "tools": [_function(tool.name) for tool in tools]}
            return {"type": "allowed_tools", "allowed_tools": allowed}
    # What the API of responses calls its default, clients send without tools too.
    return body.tool_choice if body.tools or body.tool_choice == "required" else None


def _function(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


def _format(asked: Any) -> dict[str, Any]:
    if not isinstance(asked, NamedSchemaFormat):
        return {"type": asked.type}
    return {"type": "json_schema", "json_schema": {"name": asked.name, "schema": asked.schema_}}


# -- the conversation ------------------------------------------------------------------------------


def _messages(body: ResponsesRequest) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    if body.instructions:
        messages.append({"role": "system", "content": body.instructions})
    if isinstance(body.input, str):
        return [*messages, {"role": "user", "content": body.input}]
    for item in body.input:
        _add(messages, item)
    return messages


def _add(messages: list[dict[str, Any]], item: Item) -> None:
    before = messages[-1] if messages else {}
    match item:
        case MessageItem():
            content, role = _text(item.content), "system" if item.role == "developer" else item.role
            if role == "system" and before.get("role") == "system":
                before["content"] += "\n\n" + content  # templates know one message of the system's
            else:
                messages.append({"role": role, "content": content})
        case FunctionCallItem():
            if before.get("role") != "assistant":
                before = {"role": "assistant", "content": None}
                messages.append(before)
            function = {"name": item.name, "arguments": item.arguments}
            call = {"id": item.call_id, "type": "function", "function": function}
            before.setdefault("tool_calls", []).append(call)
        case FunctionOutputItem():
            answer = {"role": "tool", "tool_call_id": item.call_id, "content": _text(item.output)}
            messages.append(answer)


def _text(parts: Parts) -> str:
    return parts if isinstance(parts, str) else joined_parts(part.text for part in parts)
