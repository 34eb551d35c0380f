"""Dtypes by name, without torch: size, and how a safetensors header spells them.

What safetensors has no word for travels as raw bytes (`U8`), its dtype kept in our own index.
Source of the spellings: the safetensors format description, https://github.com/huggingface/safetensors
"""

from __future__ import annotations

from typing import Final

_SPELLED: Final[dict[str, tuple[int, str]]] = {
    "bool": (1, "BOOL"),
    "uint8": (1, "U8"), "uint16": (2, "U16"), "uint32": (4, "U32"), "uint64": (8, "U64"),
    "int8": (1, "I8"), "int16": (2, "I16"), "int32": (4, "I32"), "int64": (8, "I64"),
    "float16": (2, "F16"), "bfloat16": (2, "BF16"), "float32": (4, "F32"), "float64": (8, "F64"),
    "float8_e4m3fn": (1, "F8_E4M3"), "float8_e5m2": (1, "F8_E5M2"),
}  # fmt: skip

_RAW_BYTES: Final[dict[str, int]] = {
    "complex32": 4, "complex64": 8, "complex128": 16,
    "float8_e4m3fnuz": 1, "float8_e5m2fnuz": 1, "float8_e8m0fnu": 1, "float4_e2m1fn_x2": 1,
    **{f"{sign}int{bits}": 1 for sign in ("", "u") for bits in range(1, 8)},
    "bits1x8": 1, "bits2x4": 1, "bits4x2": 1, "bits8": 1, "bits16": 2,
}  # fmt: skip

ITEM_BYTES: Final[dict[str, int]] = {name: size for name, (size, _) in _SPELLED.items()} | _RAW_BYTES
"""Dtype name → bytes of one element as torch counts them (sub-byte dtypes: one byte an element)."""


def safetensors_dtype(name: str) -> str | None:
    """How a safetensors header spells it; None means raw bytes."""
    found = _SPELLED.get(name)
    return found[1] if found else None
