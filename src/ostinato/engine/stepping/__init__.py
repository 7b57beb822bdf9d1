"""From a scheduled step to one on the device: rows, graphs, tokens on their way back."""
