"""Grammars of strangers, each followed in a process of its own that may die, hang or be killed."""
