"""Compiles grammars beside the steps: a large schema takes longer than a step may wait."""

from __future__ import annotations

import queue
import threading

from ostinato.text.errors import GrammarError
from ostinato.text.grammar import Grammar, GrammarCompiler
from ostinato.text.structured import StructuredOutputs
from ostinato.text.tokenizer import Tokenizer


class GrammarThread:
    """Started with the first grammar; what it has done is fetched between two steps."""

    def __init__(self, tokenizer: Tokenizer | None, vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._asked: queue.SimpleQueue[tuple[int, StructuredOutputs]] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[tuple[int, Grammar | str]] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def ask(self, id: int, wanted: StructuredOutputs) -> None:
        """Compile a grammar for a request."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._compile, name="ostinato-grammars", daemon=True)
            self._thread.start()
        self._asked.put((id, wanted))

    def done(self) -> list[tuple[int, Grammar | str]]:
        """Grammars compiled since the last time, or what is wrong with them."""
        found = []
        while not self._done.empty():
            found.append(self._done.get())
        return found

    def _compile(self) -> None:
        compiler: GrammarCompiler | None = None
        while True:
            id, wanted = self._asked.get()
            try:
                if self._tokenizer is None:
                    raise GrammarError("structured outputs are about text, and this model has no tokenizer")
                compiler = compiler or GrammarCompiler(self._tokenizer, self._vocab_size)
                self._done.put((id, compiler.start(wanted)))
            except GrammarError as error:
                self._done.put((id, str(error)))
            except Exception as error:  # of a library, over input from outside: the thread serves the others
                self._done.put((id, f"the grammar cannot be compiled: {type(error).__name__}: {error}"))
