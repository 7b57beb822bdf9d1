"""The model as a positional argument, as in `ostinato serve Qwen/Qwen3-0.6B`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import typer

from ostinato.graphs.errors import ConfigError

ModelArgument = Annotated[
    str | None,
    typer.Argument(metavar="MODEL", help="Same as --model.", show_default=False),
]


def with_model(engine: Mapping[str, Any], name: str | None) -> dict[str, Any]:
    """The engine's options with the model, whichever way it was given."""
    if name is None:
        return dict(engine)
    if engine.get("model") not in (None, name):
        raise ConfigError(f"two models were given: {name} and --model {engine['model']}; give only one")
    return {**engine, "model": name}
