"""Sizes of grids and blocks on the host. Triton's functions of these names serve kernels as well, and take 25
times as long: a tenth of a second over all captures of a model."""


def cdiv(size: int, block: int) -> int:
    """Returns the number of blocks that hold `size`."""
    return -(-size // block)


def next_power_of_2(size: int) -> int:
    """Returns the smallest power of two that is not smaller."""
    return 1 << (size - 1).bit_length()
