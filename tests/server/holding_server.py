"""`ostinato serve` with an endpoint that brings its HTTP process to a halt."""

import ctypes
import sys
import time
from typing import Any

from ostinato.__main__ import main
from ostinato.server import serving

make_app = serving.make_app


def with_a_halt(*given: Any) -> Any:
    """The application, and its gate. `/halt?how=` loop: its event loop sleeps; gil: C code holds the
    interpreter."""
    app, gate = make_app(*given)

    async def halting(scope: Any, receive: Any, send: Any) -> None:
        if scope.get("path") == "/halt":
            if scope["query_string"] == b"how=loop":
                time.sleep(1000)
            ctypes.PyDLL(None).sleep(1000)
        await app(scope, receive, send)

    return halting, gate


serving.make_app = with_a_halt
if __name__ == "__main__":
    sys.argv[1:1] = ["serve"]
    main()
