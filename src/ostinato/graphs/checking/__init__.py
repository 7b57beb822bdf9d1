"""Checks of graphs: addresses, stale outputs, comparison with eager."""
