"""Untrusted grammars, each followed in its own process, which may die, hang or be killed."""
