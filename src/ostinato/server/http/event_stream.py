"""Server-sent events: what a generation brings, as it comes."""

from __future__ import annotations

from collections.abc import Callable

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ..openai.errors import ApiError
from ..openai.generation import ClientGone, Generation
from .client_watch import ClientWatch

DONE = b"data: [DONE]\n\n"


def event(json: bytes) -> bytes:
    """One event."""
    return b"data: " + json + b"\n\n"


class EventStream(Response):
    """Streams a generation. A slow reader holds up nobody: it finds more in its next event.

    `chunks` gives the bodies of the events for what has come since it was called last; it is called for
    the last time when the generation is finished.
    """

    media_type = "text/event-stream"

    def __init__(self, generation: Generation, chunks: Callable[[], list[bytes]]) -> None:
        self.status_code = 200
        self.background = None
        self.body = b""
        self._generation = generation
        self._chunks = chunks
        self.init_headers({"cache-control": "no-cache", "x-request-id": generation.id})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send until the end of the generation or of the client."""
        generation = self._generation
        headers = [(name, value) for name, value in self.raw_headers if name != b"content-length"]
        try:
            async with ClientWatch(receive, lambda: generation.end(ClientGone())):
                await send({"type": "http.response.start", "status": 200, "headers": headers})
                while True:
                    if events := [event(chunk) for chunk in self._chunks()]:
                        body = b"".join(events)
                        await send({"type": "http.response.body", "body": body, "more_body": True})
                    generation.check()
                    if generation.is_finished:
                        break
                    await generation.changed()
                await send({"type": "http.response.body", "body": DONE})
        except ClientGone:
            pass
        except ApiError as error:
            await send({"type": "http.response.body", "body": event(error.body)})
        finally:
            generation.end()
