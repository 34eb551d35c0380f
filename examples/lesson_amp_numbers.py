"""What 16 bits hold, what loss scaling rescues, and what training a parameter costs in bytes.

python examples/lesson_amp_numbers.py
"""

from __future__ import annotations

import torch

TINY_GRADIENT = 1e-8
SCALE = 65536.0
BYTES_PER_PARAMETER = {
    "weight, 16 bit": 2,
    "gradient, 16 bit": 2,
    "master weight, fp32": 4,
    "Adam's first moment, fp32": 4,
    "Adam's second moment, fp32": 4,
}


def in_fp16(value: float) -> float:
    return float(torch.tensor(value).half())


def rescued(value: float) -> float:
    """Scaled before it becomes fp16, unscaled in fp32 afterwards."""
    return float(torch.tensor(value * SCALE).half().float() / SCALE)


def gigabytes(num_parameters: float) -> float:
    return num_parameters * sum(BYTES_PER_PARAMETER.values()) / 1e9


def main() -> None:
    for dtype in (torch.float16, torch.bfloat16):
        limits = torch.finfo(dtype)
        name = str(dtype).removeprefix("torch.")
        print(f"{name:9s} smallest normal {limits.smallest_normal:.1e}, largest {limits.max:.6g}, eps {limits.eps:.1e}")
    print(f"a gradient of {TINY_GRADIENT:g} in fp16: {in_fp16(TINY_GRADIENT):g}")
    print(f"scaled by {SCALE:g} before, unscaled after: {rescued(TINY_GRADIENT):.4g}")
    each = sum(BYTES_PER_PARAMETER.values())
    parts = " + ".join(str(size) for size in BYTES_PER_PARAMETER.values())
    print(f"{parts} = {each} bytes a parameter: 125M parameters take {gigabytes(125e6):.1f} GB")


if __name__ == "__main__":
    main()
