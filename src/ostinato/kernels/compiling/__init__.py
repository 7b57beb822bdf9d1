"""Compiles kernels before they are needed: `compile_ahead` collects them, processes compile them."""
