"""Messages in the form that chat templates expect: contents are texts, arguments of calls are objects."""

import json
from collections.abc import Iterable, Mapping
from typing import Any

from .errors import TokenizerError


def joined_parts(texts: Iterable[str]) -> str:
    """The text of a message that came in parts: joined with newlines, as in vLLM. Clients send parts that are
    separate texts, whose words would run together without a separator."""
    return "\n".join(texts)


def with_arguments_read(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message in the form that templates expect, from the API's form, in which absent values are null and
    arguments of calls are JSON strings.

    A template would write these as `None`, and as strings in quotes.
    """
    calls = message.get("tool_calls")
    content = message.get("content")
    read = {**message, "content": "" if content is None else content}
    if not calls:
        return {name: value for name, value in read.items() if name != "tool_calls"}
    return read | {"tool_calls": [_with_arguments_read(call) for call in calls]}


def _with_arguments_read(call: Any) -> Any:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        return call
    return {**call, "function": {**function, "arguments": _read(function.get("arguments"))}}


def _read(arguments: Any) -> Any:
    if arguments is None:
        return {}
    if not isinstance(arguments, str):
        return arguments
    if not arguments.strip():  # a function without arguments, as some models call it
        return {}
    try:
        return json.loads(arguments)
    except json.JSONDecodeError as error:
        # Where, and not what: this is logged, and what was said is nobody's business.
        where = f"{error.msg} at character {error.pos}"
        raise TokenizerError(f"the arguments of a tool call are not JSON: {where}") from None
    except (ValueError, RecursionError):
        raise TokenizerError("the arguments of a tool call are not JSON that can be read") from None
