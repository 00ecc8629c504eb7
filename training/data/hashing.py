"""One way to scramble 64-bit integers, the same on every machine and for every version of NumPy."""

import numpy as np
import numpy.typing as npt

Unsigned = npt.NDArray[np.uint64]


def scrambled(value: Unsigned) -> Unsigned:
    """Spread each number over all 64 bits, one to one (the finaliser of splitmix64, Steele, Lea and Flood 2014)."""
    value = value + np.uint64(0x9E3779B97F4A7C15)
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))
