"""A GAN, a compiled model, an average beside tied, frozen and unused weights: killed by SIGKILL, each is its twin."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from samerun.checkpoint import Store
from samerun.drill.traces import causes, first_differences, read_traces

HERE = Path(__file__).parent
NUM_POINTS = {"gan": 4, "compiled": 2, "average": 3}
EVERYWHERE = [
    *(f"window:{window}.{where}" for window in (0, 2, 3, 5) for where in ("microbatch:0", "microbatch:1", "step")),
    *(f"edge:{window}" for window in (0, 1, 2, 5, 6)),
    "save:staged", "save:manifest", "save:committed",
]  # fmt: skip


def kill(folder: Path, kind: str, *points: str) -> dict[str, list[int]]:
    done = subprocess.run(
        [sys.executable, str(HERE / "killed.py"), str(folder), kind, *points],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{HERE}:{os.environ.get('PYTHONPATH', '')}"},
        stdout=subprocess.PIPE,
        timeout=600,
        check=True,
    )
    codes: dict[str, list[int]] = json.loads(done.stdout)
    return codes


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("killed")
    (folder / "codes.json").write_text(json.dumps(kill(folder / "runs", "all")))
    return folder


def require_twin(folder: Path, codes: Sequence[int], *, num_points: int) -> None:
    assert list(codes) == [0, *([-9] * num_points), 0, 0], (folder / "run.log").read_text()[-3000:]
    twin, run, control = (read_traces(folder / f"{name}-trace") for name in ("twin", "run", "control"))
    assert {name: first for name, first in first_differences(twin, run).items() if first} == {}
    assert causes(run) == []
    assert {line.attempt for line in run} == set(range(1, num_points + 2))
    assert "moments" in causes(control)
    assert first_differences(twin, control)["weights"] is not None


@pytest.mark.parametrize("kind", NUM_POINTS)
def test_killed_for_real_it_is_its_twin(place: Path, kind: str) -> None:
    codes = json.loads((place / "codes.json").read_text())[kind]
    require_twin(place / "runs" / kind, codes, num_points=NUM_POINTS[kind])


def test_compiled_or_not_the_names_are_the_models_own(place: Path) -> None:
    store = Store(place / "runs" / "compiled" / "run")
    entries = store.catalog().entries
    assert len(entries) > 2
    for entry in entries:
        with store.open(entry) as checkpoint:
            names = [key for part in ("weights", "buffers", "moments") for key in checkpoint.source(part).specs]
        assert "last.weight" in names and not any("_orig_mod" in name for name in names)


@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", NUM_POINTS)
def test_killed_everywhere(tmp_path: Path, kind: str) -> None:
    codes = kill(tmp_path, kind, *EVERYWHERE)[kind]
    require_twin(tmp_path / kind, codes, num_points=len(EVERYWHERE))
