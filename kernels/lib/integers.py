"""Integers of launch grids and block sizes."""

import triton


def cdiv(a: int, b: int) -> int:
    """Returns a / b, rounded up."""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """Returns the smallest power of two that is n or more."""
    return triton.next_power_of_2(n)
