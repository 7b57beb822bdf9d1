"""Other engines, each in a process of its own, serving the same workloads."""
