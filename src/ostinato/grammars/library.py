"""xgrammar, without imports that grammars do not need.

Its package imports torch and transformers, for masks on a device and for transformers' tokenizers: seconds
and hundreds of MiB. Neither is used here, so empty modules take their place.
"""

from __future__ import annotations

import importlib
import importlib.util
import re
import sys
import types
from collections.abc import Sequence
from typing import Any

from ostinato.text.errors import GrammarError

_PLACE_IN_SOURCE = re.compile(r"(\[\d\d:\d\d:\d\d\]\s*)?\S+\.(cc|cpp|cu|h|hpp|py):\d+:?\s*")
_CONDITION = re.compile(r"Check failed:.*?is false:?\s*")
_USUAL = (
    '{"type": "object"}',
    '{"type": "object", "properties": {"a": {"type": "string"}, "b": {"type": "integer"}, "c": {"type": '
    '"array", "items": {"type": "number"}}, "d": {"type": "boolean"}}, "required": ["a"]}',
)
"""Schemas with the most common parts."""


class Library:
    """A compiler for one vocabulary."""

    def __init__(self, vocabulary: Sequence[bytes], vocab_size: int, stop_token_ids: Sequence[int]) -> None:
        compiler, self._matcher, info = _modules()
        described = info.TokenizerInfo(
            list(vocabulary),
            vocab_type=info.VocabType.RAW,
            vocab_size=vocab_size,
            stop_token_ids=list(stop_token_ids),
        )
        # One thread: processes are forked from here, and a fork keeps only the thread that forks.
        self._compiler = compiler.GrammarCompiler(described, max_threads=1)

    def warm_up(self) -> None:
        """Compile what most schemas have in common: processes forked from here then find it done."""
        for schema in _USUAL:
            self._compiler.compile_json_schema(schema)

    def compiled(self, kind: str, text: str) -> Any:
        """A compiled grammar. Raises GrammarError if it cannot be followed."""
        compiler = self._compiler
        try:
            match kind:
                case "json":
                    return compiler.compile_json_schema(text)
                case "regex":
                    return compiler.compile_regex(text)
                case "grammar":
                    return compiler.compile_grammar(text)
                case "structural_tag":
                    return compiler.compile_structural_tag(text)
                case _:
                    # Not just any JSON value: callers of json_object expect an object.
                    return compiler.compile_json_schema('{"type": "object"}', any_whitespace=True)
        except MemoryError:
            raise GrammarError("it takes more memory than a grammar is allowed") from None
        except Exception as error:  # raised by a library, for untrusted input
            raise GrammarError(plain_words(str(error))) from None

    def matcher(self, compiled: Any) -> Any:
        """A matcher for a new text."""
        return self._matcher.GrammarMatcher(compiled)


def plain_words(message: str) -> str:
    """A message of the library without its source locations."""
    if "bad_alloc" in message:
        return "it takes more memory than a grammar is allowed"
    kept = _CONDITION.sub("", _PLACE_IN_SOURCE.sub("", message))
    return " ".join(kept.split())[:500] or "the grammar library refuses it without giving a reason"


def _modules() -> list[Any]:
    """xgrammar's modules: compiler, matcher, tokenizer_info."""
    found = importlib.util.find_spec("xgrammar")
    if found is None or found.submodule_search_locations is None:
        raise GrammarError(
            "structured outputs need xgrammar: pip install -e '.[server]' in Ostinato's folder"
        )
    package = types.ModuleType("xgrammar")
    package.__path__ = list(found.submodule_search_locations)
    sys.modules["xgrammar"] = package
    _import_without_torch("tvm_ffi")
    torch, transformers = types.ModuleType("torch"), types.ModuleType("transformers")
    vars(torch).update(int32="int32", tensor=lambda *_, **__: None, Tensor=object)
    vars(transformers).update(PreTrainedTokenizerBase=object, PreTrainedTokenizerFast=object)
    sys.modules.update(torch=torch, transformers=transformers)
    for name in ("load_binding", "exception"):  # others rely on them, in versions that have them
        if importlib.util.find_spec(f"xgrammar.{name}") is not None:
            importlib.import_module(f"xgrammar.{name}")
    return [importlib.import_module(f"xgrammar.{name}") for name in ("compiler", "matcher", "tokenizer_info")]


def _import_without_torch(name: str) -> None:
    """Import a module as if torch were not installed; does nothing if the module does not exist."""
    if importlib.util.find_spec(name) is None:
        return
    sys.modules["torch"] = None  # type: ignore[assignment]
    try:
        importlib.import_module(name)
    finally:
        del sys.modules["torch"]
