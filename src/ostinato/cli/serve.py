"""`ostinato serve`: the OpenAI-compatible server."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import typer

from .dataclass_flags import flags_of, with_flags
from .model_argument import ModelArgument, with_model

ENGINE = flags_of("engine/config.py", "EngineConfig")
SERVER = flags_of("server/config.py", "ServerConfig")


@with_flags(engine=ENGINE, server=SERVER)
def serve(model_name: ModelArgument = None, *, engine: Mapping[str, Any], server: Mapping[str, Any]) -> None:
    """Serve a model over the OpenAI API, with a live page at /.

    Keys can also be set in the environment, as OSTINATO_API_KEY (or VLLM_API_KEY) and OSTINATO_ADMIN_KEY, so
    that lists of processes do not show them. Flags of `vllm serve` and of SGLang's launch_server work too:
    see docs/flags.md. Without an admin key, VLLM_SERVER_DEV_MODE=1 means --open-admin.
    """
    from ostinato.graphs.errors import ConfigError

    try:
        from ostinato.server.config import ServerConfig
        from ostinato.server.serving import serve as run
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"{error.name} is not installed: run pip install -e '.[server]' in Ostinato's folder"
        ) from error
    keys = {name: os.environ.get(f"OSTINATO_{name.upper()}") for name in ("api_key", "admin_key")}
    # A server that was protected behind vLLM's name must not be open here.
    keys["api_key"] = keys["api_key"] or os.environ.get("VLLM_API_KEY")
    given: dict[str, Any] = {**{name: key for name, key in keys.items() if key}, **server}
    if os.environ.get("VLLM_SERVER_DEV_MODE") == "1" and not given.get("admin_key"):
        given.setdefault("open_admin", True)
    raise typer.Exit(run(with_model(engine, model_name), ServerConfig(**given)))
