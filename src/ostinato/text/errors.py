"""Errors between text and token ids."""


class TokenizerError(ValueError):
    """A tokenizer cannot be loaded or a conversation cannot be rendered; the message says why."""


class GrammarError(ValueError):
    """A schema, expression or grammar that cannot be followed as written."""
