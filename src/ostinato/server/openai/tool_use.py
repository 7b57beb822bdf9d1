"""Which tools an answer may or must call, and how many: `tools`, `tool_choice`, `parallel_tool_calls`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .conversation import AllowedTools, Tool, ToolChoice
from .errors import ApiError
from .requests import ChatRequest


@dataclass(frozen=True)
class ToolUse:
    """What a request allows its answer to call."""

    tools: tuple[Tool, ...] = ()
    """Those that the model is shown; none where nothing may be called."""
    is_required: bool = False
    """Whether the answer must be a call."""
    chosen: Tool | None = None
    """The one that must be called, where one is named."""
    only_one: bool = False
    """Whether an answer with several calls is not wanted."""

    @property
    def names(self) -> frozenset[str]:
        """Of the tools."""
        return frozenset(tool.function.name for tool in self.tools)


def tool_use(body: ChatRequest) -> ToolUse:
    """What a request says about tools; 400 where it contradicts itself."""
    tools, choice = tuple(body.tools or ()), body.tool_choice
    if choice is not None and choice != "none" and not tools:
        raise ApiError(400, "tool_choice is given without tools", param="tool_choice")
    if choice == "none" or not tools:
        return ToolUse()
    if len({tool.function.name for tool in tools}) < len(tools):
        raise ApiError(400, "tools: two of them have the same name", param="tools")
    only_one = body.parallel_tool_calls is False
    if isinstance(choice, ToolChoice):
        return ToolUse(tools, is_required=True, chosen=_named(tools, choice), only_one=True)
    if isinstance(choice, AllowedTools):
        allowed = tuple(_named(tools, each) for each in choice.allowed_tools.tools)
        return ToolUse(allowed, is_required=choice.allowed_tools.mode == "required", only_one=only_one)
    return ToolUse(tools, is_required=choice == "required", only_one=only_one)


def _named(tools: Sequence[Tool], choice: ToolChoice) -> Tool:
    for tool in tools:
        if tool.function.name == choice.function.name:
            return tool
    raise ApiError(400, f"tool_choice: there is no tool {choice.function.name!r}", param="tool_choice")
