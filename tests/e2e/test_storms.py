"""Struck again and again: SIGKILL of one rank and then all, a hundred times; SIGTERM to one of two ranks, fifty times.

`make soak` runs the whole of it; SOAK_DIR names a folder in which a storm that was cut off goes on.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from samerun.drill.traces import EDGE, causes, first_differences, read_traces

HERE = Path(__file__).parent


def storm(kind: str, folder: Path, *, num_ranks: int, num_blows: int, seconds: float) -> dict[str, Any]:
    kept = os.environ.get("SOAK_DIR")
    place = Path(kept) / f"{kind}-{num_blows}" if kept else folder
    done = subprocess.run(
        [sys.executable, str(HERE / "storm.py"), kind, str(place), str(num_ranks), str(num_blows)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{HERE}:{os.environ.get('PYTHONPATH', '')}"},
        stdout=subprocess.PIPE,
        timeout=seconds,
        check=True,
    )
    told: dict[str, Any] = json.loads(done.stdout)
    print(f"\n{kind}: {told['blows']} blows on {num_ranks} ranks in {told['seconds']:.0f} s")
    assert told["ended"] and set(told["codes"].values()) == {0}, (place / "run.log").read_text()[-3000:]
    assert told["blows"] >= 0.9 * num_blows, told
    twin, run = read_traces(place / "twin-trace"), read_traces(place / "run-trace")
    assert causes(run) == []
    assert {name: first for name, first in first_differences(twin, run).items() if first} == {}
    return {**told, "lines": run}


@pytest.mark.soak
@pytest.mark.timeout(5400)
@pytest.mark.parametrize("num_blows", [10, 100])
def test_sigkill_after_sigkill_is_the_twin(tmp_path: Path, num_blows: int) -> None:
    storm("kill", tmp_path, num_ranks=4, num_blows=num_blows, seconds=5000)


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("num_blows", [10, 50])
def test_sigterm_to_one_of_two_ranks_stops_both_at_the_same_window(tmp_path: Path, num_blows: int) -> None:
    told = storm("term", tmp_path, num_ranks=2, num_blows=num_blows, seconds=3000)
    assert told["odd"] == []
    ends: dict[int, dict[int, int]] = {}
    for line in told["lines"]:
        if line.kind == EDGE:
            ends.setdefault(line.attempt, {})[line.rank] = line.window
    assert all(len(set(windows.values())) == 1 for windows in ends.values()), ends
