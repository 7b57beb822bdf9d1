"""A server's life: bind, start the engine, serve, and leave in order."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import uvicorn

from ostinato.engine.adapters.lora_request import parsed_module
from ostinato.graphs.errors import ConfigError
from ostinato.models.default_model import DEFAULT_MODEL_NAME

from .config import ServerConfig
from .engine_client.client import EngineClient, EngineLimits, EngineState
from .forgiving_streams import forgive_full_disks
from .garbage import spare_long_lived_objects
from .guard import Guard
from .http.app import make_app
from .http.connections import ClientLimits, Connections, room_for_connections
from .http.probes import PROBE_CONNECTIONS, PROBE_SECONDS, ProbesOnly
from .leaving import LastResort
from .log_lines import announce
from .service import Service
from .throughput_log import ThroughputLog

HTTP_END_SECONDS = 1
"""That answers have to reach their clients when the server leaves."""
END_SECONDS = 1.8
"""That a server has for everything else when the time of its requests is over."""
GUARD_SECONDS = 0.15
"""Behind these, the guard ends a server that did not end itself."""
RED_SECONDS = 2.0
"""How long a server whose engine died still answers, so that clients and probes learn of it."""


def serve(engine_options: Mapping[str, Any], config: ServerConfig) -> int:
    """Serve until a signal or the engine's death; the process's exit code."""
    guard = Guard(config.grace_seconds + END_SECONDS + GUARD_SECONDS, config.stall_timeout)
    listening = _bind(config.host, config.port)
    probing = None if config.probe_port is None else _bind(config.host, config.probe_port)
    # A full disk under the log, or nobody at the other end of a pipe, is no reason to stop serving.
    forgive_full_disks()
    code = asyncio.Runner(loop_factory=_loop_factory()).run(
        _serve(engine_options, config, listening, probing, guard)
    )
    # Threads may still be at work on something that nobody wants any more: nothing waits for them.
    os._exit(code)


async def _serve(
    engine_options: Mapping[str, Any],
    config: ServerConfig,
    listening: socket.socket,
    probing: socket.socket | None,
    guard: Guard,
) -> int:
    server = _Server(engine_options, config)
    return await server.run(listening, probing, guard)


class _Server:
    """The HTTP server and the engine, from start to end."""

    def __init__(self, engine_options: Mapping[str, Any], config: ServerConfig) -> None:
        self._config = config
        self._engine = EngineClient(
            engine_options,
            limits=EngineLimits(
                config.heartbeat_timeout,
                config.step_timeout,
                config.max_engine_restarts if config.restart_engine else None,
            ),
            on_ready=lambda ready: self._on_ready(ready),
            on_step=lambda: self._service.metrics.on_step(),
            adapters=lambda: self._service.adapters,
        )
        name = config.served_model_name or _model_name(engine_options.get("model"))
        _refuse_own_name(name, engine_options.get("lora_modules") or ())
        self._service = Service(config, self._engine, name)
        room = room_for_connections(config.max_connections)
        if room < config.max_connections:
            announce(f"the limit on descriptors leaves room for {room} connections")
        limits = ClientLimits.of(config, room)
        self._connections = Connections(room, config.client_timeout, config.max_body_bytes, limits)
        self._last_resort = LastResort(self._engine.kill)
        app, self._connections.gate = make_app(self._service)
        self._http = _Http(_http_config(app, self._connections))
        self._probes: _Http | None = None
        if config.probe_port is not None:
            patience = min(PROBE_SECONDS, config.client_timeout)
            self._probe_connections = Connections(PROBE_CONNECTIONS, patience, 0, ClientLimits())
            self._probes = _Http(_http_config(ProbesOnly(app), self._probe_connections))
        self._signalled = asyncio.Event()
        self._address = ""
        self._tasks: list[asyncio.Task[None]] = []
        """They end with the loop."""

    async def run(self, listening: socket.socket, probing: socket.socket | None, guard: Guard) -> int:
        """Serve until the end; the exit code."""
        self._address = _url(listening)
        announce(f"listening on {self._address}")
        guard.watch(self._signalled.set)
        self._service.history.start()
        http = asyncio.create_task(self._http.serve(sockets=[listening]))
        if self._probes is not None and probing is not None:
            announce(f"probes on {_url(probing)}")
            self._tasks.append(asyncio.create_task(self._probes.serve(sockets=[probing])))
            self._tasks.append(asyncio.create_task(self._probe_connections.watch()))
        engine = asyncio.create_task(self._engine.run())
        signalled = asyncio.create_task(self._signalled.wait())
        self._tasks.append(asyncio.create_task(self._connections.watch()))
        self._tasks.append(asyncio.create_task(self._service.keys.watch(self._service.end_revoked)))
        if not self._config.disable_log_stats:
            self._tasks.append(asyncio.create_task(ThroughputLog(self._service).run()))
        await asyncio.wait({http, engine, signalled}, return_when=asyncio.FIRST_COMPLETED)
        if signalled.done():
            return await self._leave(http, engine)
        signalled.cancel()
        what = await engine if engine.done() else "the HTTP server ended"
        announce(f"{what}; exiting")
        if self._engine.state is EngineState.DEAD and self._engine.ready is not None:
            await asyncio.sleep(RED_SECONDS)
        await self._end(http, engine)
        return 1

    async def _leave(self, http: asyncio.Task[None], engine: asyncio.Task[str | None]) -> int:
        """Let running requests finish within their grace, tell the others, and go."""
        self._service.is_stopping = True
        self._signalled.clear()
        self._last_resort.within(self._config.grace_seconds + END_SECONDS)
        announce(f"stopping; {len(self._service.generations)} requests under way")
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._config.grace_seconds):
                while self._engine.num_unfinished and not self._signalled.is_set() and not engine.done():
                    await asyncio.sleep(0.05)
        await self._end(http, engine)
        announce("stopped")
        return 0

    async def _end(self, http: asyncio.Task[None], engine: asyncio.Task[str | None]) -> None:
        """End everything, in two seconds at most."""
        self._last_resort.within(END_SECONDS)
        # That connections are cut is no news now.
        logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)
        self._engine.fail_all("the server is shutting down")
        self._connections.drop_unheard()
        self._http.should_exit = True
        if self._probes is not None:
            self._probes.should_exit = True
        if not engine.done():
            await self._engine.stop()
        await asyncio.wait({http, engine})
        self._connections.drop_all()
        self._service.close()

    def _on_ready(self, ready: Any) -> None:
        self._service.on_ready(ready)
        spare_long_lived_objects()
        announce(f"ready: {self._service.model_name} on {self._address}")


class _Http(uvicorn.Server):
    """uvicorn without its signal handlers: the server has its own order of leaving."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Nothing to capture."""
        yield


def _http_config(app: Any, connections: Connections) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        http=connections.protocol(),  # type: ignore[arg-type]
        ws="none",
        log_level="error",
        access_log=False,
        proxy_headers=False,
        server_header=False,
        timeout_graceful_shutdown=HTTP_END_SECONDS,
        lifespan="off",
    )


def _url(listening: socket.socket) -> str:
    host, port = listening.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


def _bind(host: str, port: int) -> socket.socket:
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        listening = socket.socket(family, socket.SOCK_STREAM)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((host, port))
        listening.listen(2048)
    except OSError as error:
        raise ConfigError(f"cannot listen on {host}:{port}: {error.strerror or error}") from error
    return listening


def _model_name(model: str | None) -> str:
    if model is None:
        return DEFAULT_MODEL_NAME
    return model


def _refuse_own_name(name: str, modules: Sequence[str]) -> None:
    if name in [parsed_module(module)[0] for module in modules]:
        raise ConfigError(f"lora_modules: {name!r} is the name of the model itself")


def _loop_factory() -> Any:
    try:
        import uvloop
    except ImportError:  # it is faster, and not everywhere
        return None
    return uvloop.new_event_loop
