"""The types of safetensors as NumPy knows them, and rounding between the floating ones as torch does it."""

from collections.abc import Callable
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from training.process import JobError

Array = npt.NDArray[Any]

NUMPY: Final[dict[str, np.dtype[Any]]] = {
    "F64": np.dtype("<f8"),
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype("<u2"),
    "I64": np.dtype("<i8"),
    "U64": np.dtype("<u8"),
    "I32": np.dtype("<i4"),
    "U32": np.dtype("<u4"),
    "I16": np.dtype("<i2"),
    "U16": np.dtype("<u2"),
    "I8": np.dtype("i1"),
    "U8": np.dtype("u1"),
    "BOOL": np.dtype("?"),
}
"""NumPy has no bfloat16: its bits are kept in unsigned integers."""
WIDTHS: Final = {name: kind.itemsize for name, kind in NUMPY.items()}
FLOATS: Final = ("F64", "F32", "F16", "BF16")
DTYPES: Final = {"fp32": "F32", "bf16": "BF16", "fp16": "F16"}
"""The recipe's names of types by those of safetensors."""
LARGEST_FP16: Final = 65504.0
QUIET_NAN: Final = np.uint16(0x7FC0)


def values(shape: tuple[int, ...]) -> int:
    """Return how many values a tensor of this shape has; a scalar has one."""
    count = 1
    for size in shape:
        count *= size
    return count


def converter(name: str, stored: str, wanted: str) -> Callable[[Array], Array]:
    """Return what turns an array of type `stored` into `wanted`, both floating, for the tensor `name`.

    Rounds to nearest, ties to even (IEEE 754), as torch does. The function returned keeps buffers and is of one thread;
    what it returns is valid until its next call. It raises JobError when a value does not fit into fp16.
    """
    if stored == wanted:
        return lambda array: array
    widen = {"F64": _narrow, "F32": _same, "F16": _from_half, "BF16": from_bf16}[stored]
    if wanted == "F32":
        return widen
    if wanted == "BF16":
        rounded = BFloat16()
        return lambda array: rounded(widen(array))
    return lambda array: to_half(name, widen(array))


class BFloat16:
    """Rounds fp32 to bf16, in buffers that are used again."""

    def __init__(self) -> None:
        self._sum, self._bits = np.empty(0, np.uint32), np.empty(0, np.uint16)

    def __call__(self, array: Array) -> Array:
        """Return the bits of float32 `array` as bf16, uint16 of the same shape, valid until the next call.

        Adding 0x7fff and the lowest bit that stays makes the cut round to even; a NaN, which that could turn into an
        infinity, becomes the quiet one.
        """
        flat = np.ascontiguousarray(array).reshape(-1)
        if self._sum.size < flat.size:
            self._sum, self._bits = np.empty(flat.size, np.uint32), np.empty(flat.size, np.uint16)
        total, bits, whole = self._sum[: flat.size], self._bits[: flat.size], flat.view(np.uint32)
        np.right_shift(whole, 16, out=total)
        total &= np.uint32(1)
        total += np.uint32(0x7FFF)
        total += whole
        bits[:] = total.view(np.uint16)[1::2]
        if flat.size and np.isnan(flat.min()):
            bits[np.isnan(flat)] = QUIET_NAN
        return bits.reshape(array.shape)


def from_bf16(bits: Array) -> Array:
    """Return bf16 bits (uint16) as float32, exactly."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def to_half(name: str, array: Array) -> Array:
    """Return float32 as float16. Raises JobError when a finite value of tensor `name` is too large for it."""
    size = np.abs(array)
    largest = size[np.isfinite(size)].max(initial=0.0)
    if largest > LARGEST_FP16:
        raise JobError(f"{name} holds {largest:.3g} and fp16 ends at {LARGEST_FP16:.0f}; export bf16 or fp32 instead")
    return array.astype(np.float16)


def _narrow(array: Array) -> Array:
    return array.astype(np.float32)


def _same(array: Array) -> Array:
    return array


def _from_half(array: Array) -> Array:
    return array.astype(np.float32)
