"""A run that lives on an object store: killed, resumed, the same as its twin; its journal, its commands, its zombie."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from object_servers import ObjectServer
from rank_pool import RankError, RankPool
from samerun.drill.traces import causes, first_differences, read_traces
from samerun.run.faults import Deed, Fault, FaultPlan
from samerun.storage.journal import read_journal
from samerun.storage.opening import open_storage


def start(
    pool: RankPool, server: ObjectServer, path: str, trace: Path, *, at: str | None = None, deed: Deed = Deed.RAISE
) -> list[dict[str, Any]] | None:
    """One start on two ranks; with `at`, both raise (or rank 1 is killed) there, and None is returned."""
    victims = (0, 1) if deed is Deed.RAISE else (1,)
    plan = FaultPlan(trace=trace, faults=tuple(Fault(at=at, rank=rank, deed=deed) for rank in victims) if at else ())
    environ = {**server.environ, "SAMERUN_FAULTS": plan.to_text()}
    try:
        done = pool.run(2, "scenarios:train", environ=environ, path=path, wrap="ddp", keep_last=2)
    except RankError as error:
        if at is None or error.kind not in ("FaultError", "SaveFailedError", "RuntimeError"):
            raise
        return None
    except RuntimeError as error:
        assert deed is Deed.KILL, error
        assert "died" in str(error)
        return None
    assert at is None, f"the run passed {at} without an interruption"
    return done


def differences(twin: Path, other: Path) -> dict[str, Any]:
    found = first_differences(read_traces(twin), read_traces(other))
    return {name: first for name, first in found.items() if first is not None}


@pytest.mark.timeout(240)
@pytest.mark.parametrize("name", ["s3", "azure"])
def test_a_run_on_an_object_store_is_its_twin(
    request: pytest.FixtureRequest, ranks: RankPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    server: ObjectServer = request.getfixturevalue(name)
    url = server.url()
    twin = start(ranks, server, str(tmp_path / "twin"), tmp_path / "twin-trace")
    for point in ["save:manifest", "window:4.microbatch:1"] if name == "s3" else ["window:4.microbatch:1"]:
        assert start(ranks, server, url, tmp_path / "run-trace", at=point) is None
    if name == "s3":
        assert start(ranks, server, url, tmp_path / "run-trace", at="window:7.step", deed=Deed.KILL) is None
    last = start(ranks, server, url, tmp_path / "run-trace")
    assert differences(tmp_path / "twin-trace", tmp_path / "run-trace") == {}
    assert causes(read_traces(tmp_path / "run-trace")) == []
    assert twin is not None and last is not None
    assert last[0]["progress"] == twin[0]["progress"]
    for variable, value in server.environ.items():
        monkeypatch.setenv(variable, value)
    storage = open_storage(url)
    events = read_journal(storage)
    started = [event for event in events if event["event"] == "started"]
    assert [event["attempt"] for event in started] == list(range(1, len(started) + 1))
    assert started[-1]["kind"] == "resumed"
    assert [event["event"] for event in events[-2:]] == ["saved", "closed"]
    assert len(storage.names("checkpoints")) == 2  # the last two; what was interrupted and what is old is gone
    _commands(url, server)


def _commands(url: str, server: ObjectServer) -> None:
    for command, verdict in (("ls", None), ("verify", "sound")):
        done = subprocess.run(
            [sys.executable, "-m", "samerun.cli", command, url, "--json"],
            env={**os.environ, **server.environ},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        told = json.loads(done.stdout)
        assert verdict is None or told["verdict"] == verdict
