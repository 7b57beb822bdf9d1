"""The static inputs of graphs: declared, filled, padded."""
