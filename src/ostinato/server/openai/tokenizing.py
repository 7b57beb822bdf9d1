"""`/tokenize`: the token ids that a prompt or a conversation has in a request with the same fields."""

from __future__ import annotations

from .errors import ApiError
from .requests import TokenizeRequest
from .served_model import ServedModel

_OF_CONVERSATIONS = (
    "tools",
    "add_generation_prompt",
    "continue_final_message",
    "chat_template_kwargs",
    "reasoning_effort",
    "chat_template",
)


async def token_ids_of(body: TokenizeRequest, model: ServedModel) -> list[int]:
    """400 for fields that would change nothing."""
    if (body.prompt is None) == (body.messages is None):
        raise ApiError(400, "give prompt or messages, one of them", param="prompt")
    if body.messages is None:
        name = next((name for name in _OF_CONVERSATIONS if getattr(body, name)), None)
        if name is not None:
            raise ApiError(400, f"{name} is for conversations: give messages", param=name)
        special = body.add_special_tokens is not False
        return await model.encode(body.prompt or "", "prompt", add_special_tokens=special, is_prompt=False)
    if body.add_special_tokens:
        message = "add_special_tokens: the chat template writes those that belong there"
        raise ApiError(400, message, param="add_special_tokens")
    return await model.encode_chat(
        body.messages,
        body.tools or (),
        add_generation_prompt=body.add_generation_prompt,
        continues=bool(body.continue_final_message),
        variables=body.chat_template_kwargs,
        reasoning_effort=body.reasoning_effort,
        template=body.chat_template,
        is_prompt=False,
    )
