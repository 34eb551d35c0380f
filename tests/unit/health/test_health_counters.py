"""Device counters against recorded replies of the driver's library, and where there is none."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from samerun.health.counters import CounterWatch, NvmlCounters, open_counters


class Nvml:
    """Answers as recorded, reading after reading; None is what the device does not count."""

    class NVMLError(Exception):
        pass

    NVML_MEMORY_ERROR_TYPE_UNCORRECTED, NVML_MEMORY_ERROR_TYPE_CORRECTED, NVML_VOLATILE_ECC = 1, 0, 0
    NVML_TEMPERATURE_GPU, NVML_CLOCK_SM = 0, 1

    def __init__(self, replies: list[dict[str, Any]], *, has_driver: bool = True) -> None:
        self._replies = replies
        self._has_driver = has_driver
        self._now: dict[str, Any] = {}

    def nvmlInit(self) -> None:  # noqa: N802  # the library's own names
        if not self._has_driver:
            raise self.NVMLError("driver not loaded")

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:  # noqa: N802
        return index

    def nvmlDeviceGetTotalEccErrors(self, handle: int, kind: int, counter: int) -> int:  # noqa: N802
        if kind == self.NVML_MEMORY_ERROR_TYPE_UNCORRECTED:
            self._now = self._replies.pop(0)
        return self._answer("ecc_uncorrected" if kind else "ecc_corrected")

    def nvmlDeviceGetPcieReplayCounter(self, handle: int) -> int:  # noqa: N802
        return self._answer("pcie_replays")

    def nvmlDeviceGetTemperature(self, handle: int, sensor: int) -> int:  # noqa: N802
        return self._answer("temperature")

    def nvmlDeviceGetClockInfo(self, handle: int, kind: int) -> int:  # noqa: N802
        return self._answer("sm_clock_mhz")

    def _answer(self, name: str) -> int:
        if self._now.get(name) is None:
            raise self.NVMLError("not supported")
        return int(self._now[name])


QUIET = {"ecc_uncorrected": 0, "ecc_corrected": 7, "pcie_replays": 3, "temperature": 61, "sm_clock_mhz": 1980}


def test_only_what_grew_is_told() -> None:
    replies = [QUIET, QUIET, {**QUIET, "ecc_uncorrected": 2, "temperature": 88}, {**QUIET, "ecc_uncorrected": 2}]
    watch = CounterWatch(NvmlCounters(0, Nvml(replies)))
    assert watch.grown() == {}
    assert watch.grown() == {"ecc_uncorrected": 2, "temperature": 88, "sm_clock_mhz": 1980}
    assert watch.grown() == {}


def test_a_device_without_a_counter_leaves_it_out() -> None:
    replies = [{**QUIET, "ecc_uncorrected": None, "ecc_corrected": None}] * 2
    counters = NvmlCounters(0, Nvml(replies))
    assert counters.read() == {"pcie_replays": 3, "temperature": 61, "sm_clock_mhz": 1980}


def test_a_driver_that_was_reset_counts_from_nothing_again() -> None:
    watch = CounterWatch(NvmlCounters(0, Nvml([{**QUIET, "pcie_replays": 9}, {**QUIET, "pcie_replays": 1}])))
    assert watch.grown() == {}


def test_without_the_library_or_the_driver_there_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert open_counters(0) is None
    monkeypatch.setitem(sys.modules, "pynvml", Nvml([], has_driver=False))
    assert open_counters(0) is None
    monkeypatch.setitem(sys.modules, "pynvml", Nvml([QUIET]))
    found = open_counters(0)
    assert found is not None and found.read()["temperature"] == 61
