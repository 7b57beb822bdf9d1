"""Ostinato under the names of other packages, for programs whose imports cannot be changed."""
