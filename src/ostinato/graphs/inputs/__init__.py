"""The static inputs of graphs: how they are declared, filled and padded."""
