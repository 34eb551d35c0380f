"""What this machine offers a training run, in facts. Standard library only: no torch, nothing is started."""

from __future__ import annotations

import os
import platform
import shutil
import time
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Final

from samerun.core.environ import Launcher
from samerun.core.units import format_bytes

_SHARED_MEMORY: Final = "/dev/shm"
_LITTLE_SHARED_BYTES: Final = 256 * 2**20
"""Containers often get 64 MiB; a DataLoader with a few workers needs more."""
_LITTLE_FREE_SHARE: Final = 0.05
_EARLIEST_YEAR: Final = 2025


@dataclass(frozen=True, slots=True, kw_only=True)
class Fact:
    """`good` is None where there is nothing to judge, only something to know."""

    name: str
    good: bool | None
    detail: str


def machine_facts(launcher: Launcher, *, folder: Path | None) -> list[Fact]:
    """Facts that cost nothing to find out. `folder`: where a local run would live; None when it is elsewhere."""
    facts = [
        Fact(name="python", good=None, detail=f"{platform.python_version()} on {platform.platform(terse=True)}"),
        _package("torch", needed=True),
        _package("obstore", needed=False),
        Fact(name="cpu", good=None, detail=f"{len(os.sched_getaffinity(0))} of {os.cpu_count()} cores are ours"),
        _ranks(launcher),
        _clock(),
        _shared_memory(Path(_SHARED_MEMORY)),
    ]
    return facts if folder is None else [*facts, _free_space(folder)]


def resident_bytes() -> tuple[int, int] | None:
    """(now, highest so far) of this process's memory; None where there is no /proc."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return None
    kib = {name: int(rest.split()[0]) for name, _, rest in (line.partition(":") for line in lines) if name in _SIZES}
    return kib["VmRSS"] * 1024, kib["VmHWM"] * 1024


_SIZES: Final = frozenset({"VmRSS", "VmHWM"})


def _package(name: str, *, needed: bool) -> Fact:
    try:
        return Fact(name=name, good=True, detail=version(name))
    except PackageNotFoundError:
        extra = "" if needed else "; s3://, gs:// and az:// need it: pip install 'samerun[cloud]'"
        return Fact(name=name, good=False if needed else None, detail=f"not installed{extra}")


def _ranks(launcher: Launcher) -> Fact:
    if launcher.rank is None:
        return Fact(name="ranks", good=None, detail="started by hand: one process")
    return Fact(name="ranks", good=None, detail=f"rank {launcher.rank} of {launcher.world_size}")


def _clock() -> Fact:
    year = time.gmtime().tm_year
    first, second = time.monotonic(), time.monotonic()
    if year < _EARLIEST_YEAR or second < first:
        detail = f"says it is {year}; set it: credentials of object stores and records of a run depend on it"
        return Fact(name="clock", good=False, detail=detail)
    return Fact(name="clock", good=True, detail=time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime()))


def _shared_memory(path: Path) -> Fact:
    if not path.is_dir():
        return Fact(name="shared memory", good=None, detail=f"no {path}")
    usage = shutil.disk_usage(path)
    detail = f"{format_bytes(usage.free)} of {format_bytes(usage.total)} free in {path}"
    if usage.free < _LITTLE_SHARED_BYTES:
        return Fact(name="shared memory", good=False, detail=f"{detail}; DataLoader workers need more (--shm-size)")
    return Fact(name="shared memory", good=True, detail=detail)


def _free_space(folder: Path) -> Fact:
    while not folder.is_dir():
        folder = folder.parent
    usage = shutil.disk_usage(folder)
    detail = f"{format_bytes(usage.free)} of {format_bytes(usage.total)} free at {folder}"
    return Fact(name="free space", good=usage.free > _LITTLE_FREE_SHARE * usage.total, detail=detail)
