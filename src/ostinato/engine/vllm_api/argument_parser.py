"""`FlexibleArgumentParser`: argparse as vLLM's scripts use it."""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Sequence
from typing import Any

_DOTTED = re.compile(r"(--?[A-Za-z][\w-]*)\.([\w.-]+)(?:=(.*))?", re.DOTALL)


class FlexibleArgumentParser(argparse.ArgumentParser):
    """Accepts names with underscores or dashes, and JSON options key by key: `-cc.cudagraph_mode=NONE`."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Like argparse; `parse_args` calls this too."""
        words = list(sys.argv[1:] if args is None else args)
        return super().parse_known_args(self._rewritten(words), namespace)

    def _rewritten(self, words: Sequence[str]) -> list[str]:
        found: list[str] = []
        parts: dict[str, dict[str, Any]] = {}
        rest = list(words)
        while rest:
            word = rest.pop(0)
            if word == "--":
                return [*found, *_joined(parts), word, *rest]
            dotted = _DOTTED.fullmatch(word)
            if dotted and self._dashed(dotted[1]) in self._option_string_actions:
                # An option may be written in two ways whose parts belong together.
                flag = self._option_string_actions[self._dashed(dotted[1])].option_strings[0]
                key, value = dotted[2], dotted[3]
                if value is None:
                    if not rest:
                        self.error(f"argument {word}: expected one argument")
                    value = rest.pop(0)
                _set(parts.setdefault(flag, {}), key.replace("-", "_").split("."), _value(value))
            elif word.startswith("--"):
                flag, equals, value = word.partition("=")
                found.append(f"{self._dashed(flag)}{equals}{value}")
            else:
                found.append(word)
        return [*found, *_joined(parts)]

    def _dashed(self, flag: str) -> str:
        """The flag as the parser knows it; some are known with underscores."""
        dashed = flag.replace("_", "-")
        return flag if flag in self._option_string_actions or not flag.startswith("--") else dashed


def _joined(parts: dict[str, dict[str, Any]]) -> list[str]:
    return [f"{flag}={json.dumps(group)}" for flag, group in parts.items()]


def _set(group: dict[str, Any], keys: list[str], value: Any) -> None:
    for key in keys[:-1]:
        group = group.setdefault(key, {})
    group[keys[-1]] = value


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text
