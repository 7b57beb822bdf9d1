"""What can go wrong between text and token ids."""


class TokenizerError(ValueError):
    """A tokenizer cannot be loaded or a conversation cannot be rendered; the text says why."""
