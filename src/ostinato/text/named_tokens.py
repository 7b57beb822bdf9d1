"""Tokens named in the files next to a `tokenizer.json`: those it lacks are added, as in transformers."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from .errors import TokenizerError
from .json_file import read_json

_Fields = dict[str, Any]
"""The fields of a token: its `content` and how it is matched."""


def named_tokens(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """A model's special tokens by role (`eos_token`). `config`: its tokenizer_config.json."""
    return {role: token["content"] for role, token in _by_role(folder, config).items()}


def add_named_tokens(backend: Any, folder: Path, config: Mapping[str, Any]) -> None:
    """Add those that a `tokenizers.Tokenizer` lacks, and make it treat as special what the files call
    special.

    People who add a token by hand often write it into only one of these files; without this function its text
    would be cut into pieces that the model has never seen.
    """
    from tokenizers import AddedToken

    special = _special(folder, config)
    try:
        listed = {
            token["content"]: {**token, "special": token.get("special", False) or token["content"] in special}
            for token in _listed(folder, config)
        }
        wanted = {**{content: {**token, "special": True} for content, token in special.items()}, **listed}
        # Ids are assigned in this order.
        tokens = [AddedToken(**wanted[content]) for content in {**listed, **special}]
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        raise TokenizerError(f"{folder}: a token that its files name cannot be added: {error!r}") from error
    held = {token.content: repr(token) for token in backend.get_added_tokens_decoder().values()}
    may_change = config.get("added_tokens_decoder") or {}
    backend.add_tokens(
        [
            token
            for token in tokens
            if token.content not in held
            or (may_change and token.content in listed and held[token.content] != repr(token))
        ]
    )


def _listed(folder: Path, config: Mapping[str, Any]) -> list[_Fields]:
    """Tokens added to the vocabulary, in the order of their ids."""
    if given := config.get("added_tokens_decoder"):
        return [_fields(given[number]) for number in sorted(given, key=int)]
    added = read_json(folder / "added_tokens.json")
    return [{"content": content} for content in sorted(added, key=added.__getitem__)]


def _special(folder: Path, config: Mapping[str, Any]) -> dict[str, _Fields]:
    """Special tokens, those with a role first."""
    legacy = {} if config.get("added_tokens_decoder") else read_json(folder / "special_tokens_map.json")
    lists = [
        fields.get(name)
        for fields in (config, legacy)
        for name in ("extra_special_tokens", "additional_special_tokens")
    ]
    more = [_fields(token) for given in lists if isinstance(given, list) for token in given]
    return {token["content"]: token for token in (*_by_role(folder, config).values(), *more)}


def _by_role(folder: Path, config: Mapping[str, Any]) -> dict[str, _Fields]:
    given = {**read_json(folder / "special_tokens_map.json"), **config}
    more = given.get("extra_special_tokens")
    roles: Iterable[tuple[str, Any]] = [
        *((role, token) for role, token in given.items() if role.endswith("_token")),
        *(more.items() if isinstance(more, Mapping) else ()),
    ]
    return {role: _fields(token) for role, token in roles if token and isinstance(token, str | Mapping)}


def _fields(token: str | Mapping[str, Any]) -> _Fields:
    if isinstance(token, str):
        return {"content": token}
    return {name: value for name, value in token.items() if name != "__type"}
