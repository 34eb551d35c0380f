"""What a device counts about itself: memory errors, replays on its bus, throttling. NVML where it is; else nothing.

Counters only ever grow, so what matters is what they grew by between two looks. They support a verdict about a device;
by themselves they give none.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any, Final, Protocol

ERRORS: Final[tuple[str, ...]] = ("ecc_uncorrected", "ecc_corrected", "pcie_replays")
"""Counters whose growth is told."""


class Counters(Protocol):
    """Named numbers of one device, read now. A counter that the device does not have is left out."""

    def read(self) -> Mapping[str, float]: ...


class NvmlCounters:
    """Of the NVIDIA device `index`, through the module `nvml` (pynvml)."""

    def __init__(self, index: int, nvml: Any) -> None:
        self._nvml = nvml
        nvml.nvmlInit()
        self._handle = nvml.nvmlDeviceGetHandleByIndex(index)

    def read(self) -> dict[str, float]:
        nvml, handle = self._nvml, self._handle
        asked: dict[str, Callable[[], Any]] = {
            "ecc_uncorrected": lambda: nvml.nvmlDeviceGetTotalEccErrors(
                handle, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
            ),
            "ecc_corrected": lambda: nvml.nvmlDeviceGetTotalEccErrors(
                handle, nvml.NVML_MEMORY_ERROR_TYPE_CORRECTED, nvml.NVML_VOLATILE_ECC
            ),
            "pcie_replays": lambda: nvml.nvmlDeviceGetPcieReplayCounter(handle),
            "temperature": lambda: nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU),
            "sm_clock_mhz": lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM),
        }
        found = {}
        for name, ask in asked.items():
            try:
                found[name] = float(ask())
            except nvml.NVMLError:  # this device does not count that
                continue
        return found


def open_counters(index: int) -> Counters | None:
    """Of the CUDA device `index`; None where pynvml or the driver's library is not there."""
    try:
        nvml = importlib.import_module("pynvml")
    except ImportError:
        return None
    try:
        return NvmlCounters(index, nvml)
    except nvml.NVMLError:
        return None


class CounterWatch:
    """What grew since the last look."""

    def __init__(self, counters: Counters) -> None:
        self._counters = counters
        self._last = dict(counters.read())

    def grown(self) -> dict[str, float]:
        """Error counters that grew, by how much, beside what the device is at now; empty where none did."""
        now = dict(self._counters.read())
        grown = {name: now[name] - self._last.get(name, now[name]) for name in ERRORS if name in now}
        self._last = now
        errors = {name: by for name, by in grown.items() if by > 0}
        return {**errors, **{name: value for name, value in now.items() if name not in ERRORS}} if errors else {}
