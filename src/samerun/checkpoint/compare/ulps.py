"""How far two tensors are apart, in units in the last place, from their bits alone. NumPy only, also for bfloat16.

Floats of one format, read as sign and magnitude integers, are in the order of their values; the distance of two is the
number of representable values from one to the other, ±0 being one value. It needs no decoding, so it works for every
format with a sign bit on top. NaNs have no distance and are counted apart.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np

Array = np.ndarray[Any, Any]


@dataclass(frozen=True, slots=True)
class _Format:
    """Bits of a binary floating-point format: width, and the magnitude above which a pattern is NaN."""

    unsigned: Any
    sign: int
    infinity: int


FLOATS: Final[dict[str, _Format]] = {
    "float64": _Format(np.uint64, 1 << 63, 0x7FF0 << 48),
    "float32": _Format(np.uint32, 1 << 31, 0x7F80 << 16),
    "bfloat16": _Format(np.uint16, 1 << 15, 0x7F80),
    "float16": _Format(np.uint16, 1 << 15, 0x7C00),
    "float8_e5m2": _Format(np.uint8, 1 << 7, 0x7C),
    "float8_e4m3fn": _Format(np.uint8, 1 << 7, 0x7E),
}
"""For float8_e4m3fn, which has no infinity, the largest number stands in its place."""


@dataclass(slots=True)
class Distance:
    """What is known of the difference of two tensors after all their parts were added."""

    num_elements: int = 0
    num_different: int = 0
    num_nan_different: int = 0
    """Elements where exactly one side is NaN, or both are with other payloads."""
    max_ulps: int | None = None
    """None where the dtype is no float that is known here, or nothing differs but NaNs."""

    def add(self, left: Array, right: Array, dtype: str) -> None:
        """Adds two parts of equal shape, given as integers of the element's size."""
        a, b = _bits(left), _bits(right)
        self.num_elements += left.size
        different = a != b if a.ndim == 1 else (a != b).any(axis=1)
        count = int(different.sum())
        self.num_different += count
        if count and dtype in FLOATS:
            self._add_floats(a[different], b[different], FLOATS[dtype])

    def _add_floats(self, a: Array, b: Array, form: _Format) -> None:
        magnitude = form.unsigned(form.sign - 1)
        a, b = a.view(form.unsigned), b.view(form.unsigned)
        size_a, size_b = a & magnitude, b & magnitude
        nan = (size_a > form.unsigned(form.infinity)) | (size_b > form.unsigned(form.infinity))
        self.num_nan_different += int(nan.sum())
        a, b, size_a, size_b = (values[~nan] for values in (a, b, size_a.astype(np.uint64), size_b.astype(np.uint64)))
        if not a.size:
            return
        same_sign = (a ^ b) < form.unsigned(form.sign)
        apart = np.where(same_sign, np.maximum(size_a, size_b) - np.minimum(size_a, size_b), size_a + size_b)
        self.max_ulps = max(self.max_ulps or 0, int(apart.max()))


def _bits(values: Array) -> Array:
    """Contiguous unsigned integers; 16-byte elements as rows of two."""
    flat = np.ascontiguousarray(values).reshape(-1)
    if flat.dtype.itemsize == 16:
        return flat.view(np.uint64).reshape(-1, 2)
    return flat.view(f"u{flat.dtype.itemsize}")
