"""The items of a response as they grow, and the events that tell of it."""

from __future__ import annotations

from secrets import token_hex
from typing import Any

import msgspec

from ..responses import TokenLogprob
from ..tool_calls.call_reader import CallPiece

Event = dict[str, Any]
Item = dict[str, Any]


class Output:
    """Messages and function calls, one open at a time."""

    def __init__(self) -> None:
        self.items: list[Item] = []
        self._is_open = False

    def add_text(self, text: str, logprobs: list[TokenLogprob]) -> list[Event]:
        """Text of the answer goes on, or begins."""
        events = [] if self._is_message else [*self.close(), *self._open_message()]
        part = self.items[-1]["content"][0]
        part["text"] += text
        shown = [msgspec.to_builtins(each) for each in logprobs]
        part["logprobs"] += shown
        return [*events, self._event("output_text.delta", content_index=0, delta=text, logprobs=shown)]

    def add_call(self, piece: CallPiece) -> list[Event]:
        """A call begins, or its arguments go on."""
        events: list[Event] = []
        if piece.name is not None:
            events = self.close()
            call = {"id": f"fc_{token_hex(16)}", "call_id": f"call_{token_hex(12)}", "name": piece.name}
            events += self._open({"type": "function_call", **call, "arguments": ""})
        if piece.arguments:
            self.items[-1]["arguments"] += piece.arguments
            events.append(self._event("function_call_arguments.delta", delta=piece.arguments))
        return events

    def close(self, status: str = "completed") -> list[Event]:
        """The item at the end is over."""
        if not self._is_open:
            return []
        item = self.items[-1]
        item["status"] = status
        events = self._message_is_over(item) if self._is_message else self._call_is_over(item)
        self._is_open = False
        return [*events, self._item_event("done")]

    @property
    def _is_message(self) -> bool:
        return self._is_open and self.items[-1]["type"] == "message"

    def _open_message(self) -> list[Event]:
        message = {"type": "message", "id": f"msg_{token_hex(16)}", "role": "assistant", "content": []}
        events = self._open(message)
        part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        events.append(self._event("content_part.added", content_index=0, part={**part, "logprobs": []}))
        self.items[-1]["content"].append(part)
        return events

    def _open(self, item: Item) -> list[Event]:
        self._is_open = True
        self.items.append({**item, "status": "in_progress"})
        return [self._item_event("added")]

    def _message_is_over(self, item: Item) -> list[Event]:
        [part] = item["content"]
        text = self._event("output_text.done", content_index=0, text=part["text"], logprobs=part["logprobs"])
        return [text, self._event("content_part.done", content_index=0, part=part)]

    def _call_is_over(self, item: Item) -> list[Event]:
        given = {"name": item["name"], "arguments": item["arguments"]}
        return [self._event("function_call_arguments.done", **given)]

    def _item_event(self, what: str) -> Event:
        item = dict(self.items[-1])
        if "content" in item:  # events are written later, when the item has grown
            item["content"] = list(item["content"])
        return {
            "type": f"response.output_item.{what}",
            "output_index": len(self.items) - 1,
            "item": item,
        }

    def _event(self, what: str, **fields: Any) -> Event:
        item = self.items[-1]
        place = {"item_id": item["id"], "output_index": len(self.items) - 1}
        return {"type": f"response.{what}", **place, **fields}
