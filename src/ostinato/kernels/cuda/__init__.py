"""Kernels in CUDA C++, for what Triton's language cannot say; compiled by NVRTC when first needed."""
