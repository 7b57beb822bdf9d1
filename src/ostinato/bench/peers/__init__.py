"""Other engines, each in its own process, serving the same workloads."""
