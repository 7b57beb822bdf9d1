"""From a scheduled step to one on the device: rows, graphs, and the return of tokens."""
