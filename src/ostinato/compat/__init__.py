"""Ostinato under the names of others, for programs that cannot be told to import something else."""
