"""CUDA kernels without a GPU: the same sources, compiled by g++ against another `device.cuh`."""
