"""What can go wrong between text and token ids."""


class TokenizerError(ValueError):
    """A tokenizer cannot be loaded or a conversation cannot be rendered; the text says why."""


class GrammarError(ValueError):
    """A schema, expression or grammar that cannot be followed as it is written."""
