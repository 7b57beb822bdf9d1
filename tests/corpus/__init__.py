"""Ordinary programs: code as people write it, run from graphs and eagerly, and compared."""
