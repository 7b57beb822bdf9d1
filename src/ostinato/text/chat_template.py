"""Chat templates: the Jinja program in a model's tokenizer files that turns messages into a prompt."""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any

from .errors import TokenizerError

_END_OF_TEXT = "\ue000end of what there is\ue000 "
"""Marks the end of a message that is to be continued; what follows it is written by the template. Its
trailing space disappears if the template strips trailing spaces."""


def template_source(given: str) -> str:
    """The template in a file of that name, or the given text. Raises TokenizerError if it is neither."""
    is_text = "{" in given
    try:
        file = Path(given).expanduser()
        source = given if is_text and not file.is_file() else file.read_text()
    except OSError as error:
        if not is_text:
            raise TokenizerError(f"there is no chat template {given!r}: give a file or a template") from error
        source = given
    ChatTemplate(source, {}).check()
    return source


class ChatTemplate:
    """A compiled chat template; rendered as in transformers, for which templates are written."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """`special_tokens`: variables that a template may use: bos_token, eos_token and the like."""
        self.source = source
        self._special_tokens = dict(special_tokens)

    def check(self) -> None:
        """Raises TokenizerError if it is not a valid template."""
        _ = self._compiled

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> str:
        """The prompt for `messages`; further keywords are variables for the template."""
        from jinja2 import TemplateError

        try:
            return self._compiled.render(
                messages=list(messages),
                tools=None if tools is None else list(tools),
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **{**self._special_tokens, **variables},
            )
        except (TemplateError, TypeError, KeyError, AttributeError) as error:
            raise TokenizerError(f"the chat template refused the messages: {error}") from error

    def render_open(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> str:
        """The same up to the end of the last message's text, so that the answer continues that text."""
        if not messages or not isinstance(messages[-1].get("content"), str):
            raise TokenizerError("continue_final_message: there is no last message with a text to continue")
        marked = {**messages[-1], "content": messages[-1]["content"] + _END_OF_TEXT}
        whole = self.render([*messages[:-1], marked], add_generation_prompt=False, tools=tools, **variables)
        begun, mark, behind = whole.rpartition(_END_OF_TEXT.rstrip())
        if not mark:
            raise TokenizerError("continue_final_message: the chat template does not write the last message")
        # A template that strips trailing spaces never wrote one after a message in the model's training.
        return begun if behind.startswith(" ") else begun.rstrip()

    def uses(self, variable: str) -> bool:
        """Whether the template uses a variable of this name."""
        from jinja2 import meta

        self.check()
        return variable in meta.find_undeclared_variables(self._environment.parse(self.source))

    @cached_property
    def _compiled(self) -> Any:
        from jinja2 import TemplateSyntaxError

        try:
            return self._environment.from_string(self.source)
        except TemplateSyntaxError as error:
            raise TokenizerError(f"the chat template is broken: {error}") from error

    @cached_property
    def _environment(self) -> Any:
        from jinja2 import TemplateError
        from jinja2.ext import Extension, LoopControlExtension
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        class GenerationBlock(Extension):
            """`{% generation %}` marks what the assistant wrote, for training; here only its body matters."""

            tags = {"generation"}

            def parse(self, parser: Any) -> Any:
                next(parser.stream)
                return parser.parse_statements(("name:endgeneration",), drop_needle=True)

        def raise_exception(message: str) -> None:
            raise TemplateError(message)

        def tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
            # Not Jinja's own, which escapes characters for HTML.
            return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)

        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[LoopControlExtension, GenerationBlock]
        )
        environment.filters["tojson"] = tojson
        environment.globals["raise_exception"] = raise_exception
        environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        return environment
