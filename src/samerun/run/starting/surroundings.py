"""What a bitwise promise rests on besides the checkpoint: software versions, hardware, numeric settings.

Recorded in every checkpoint and compared on resume; a difference turns "bitwise" into "within tolerance", out loud.
"""

from __future__ import annotations

import platform
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

import samerun


def surroundings(device: torch.device) -> dict[str, str | int | bool | None]:
    """Flat facts about this process; equal facts are what "same software and numeric settings" means."""
    facts: dict[str, str | int | bool | None] = {
        "samerun": samerun.__version__,
        "torch": str(torch.__version__),
        "numpy": np.__version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "device": device.type,
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "matmul_precision": torch.get_float32_matmul_precision(),
    }
    if device.type == "cuda":
        facts |= {
            "gpu": torch.cuda.get_device_name(device),
            "cuda": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version(),  # type: ignore[no-untyped-call]
            "cudnn_benchmark": torch.backends.cudnn.benchmark,
            "cudnn_deterministic": torch.backends.cudnn.deterministic,
        }
    return facts


def why_not_bitwise(saved: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """The reasons why the resumed run can only be promised within float tolerance; empty: bitwise."""
    reasons = [
        f"{name} was {saved.get(name)!r}, is {now.get(name)!r}"
        for name in sorted(set(saved) | set(now))
        if saved.get(name) != now.get(name)
    ]
    if now.get("device") == "cuda" and not now.get("deterministic"):
        reasons.append("deterministic kernels are off (torch.use_deterministic_algorithms)")
    return reasons
