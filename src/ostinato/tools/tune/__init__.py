"""Finds the kernels of linear layers for a GPU and a model by measuring."""
