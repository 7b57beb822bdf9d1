"""Server-sent events: what a generation brings, as it comes."""

from __future__ import annotations

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ..openai.errors import ApiError
from ..openai.generation import ClientGone, Generation
from ..openai.stream_events import Writer
from .client_watch import ClientWatch


class EventStream(Response):
    """Streams a generation. A slow reader holds up nobody: it finds more in its next event."""

    media_type = "text/event-stream"

    def __init__(self, generation: Generation, writer: Writer) -> None:
        self.status_code = 200
        self.background = None
        self.body = b""
        self._generation = generation
        self._writer = writer
        self.init_headers({"cache-control": "no-cache", "x-request-id": generation.id})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send until the end of the generation or of the client."""
        generation = self._generation
        headers = [(name, value) for name, value in self.raw_headers if name != b"content-length"]
        try:
            async with ClientWatch(receive, lambda: generation.end(ClientGone())):
                await send({"type": "http.response.start", "status": 200, "headers": headers})
                while True:
                    if events := self._writer.events():
                        body = b"".join(events)
                        await send({"type": "http.response.body", "body": body, "more_body": True})
                    generation.check()
                    if generation.is_finished:
                        break
                    await generation.changed()
                await send({"type": "http.response.body", "body": self._writer.end})
        except ClientGone:
            pass
        except ApiError as error:
            await send({"type": "http.response.body", "body": self._writer.failure(error)})
        finally:
            generation.end()
