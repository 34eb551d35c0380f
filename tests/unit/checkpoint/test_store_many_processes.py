"""Many processes at one path at the same moment, as when a job array starts: each gets what is its own, none fails."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

NUM_PROCESSES = 16

RACE = """
import json, os, sys
from samerun.checkpoint import attempts
from samerun.errors import AlreadyExistsError
from samerun.storage.local import Local
path, count = sys.argv[1], int(sys.argv[2])
ready, go = os.pipe(), os.pipe()
for number in range(count):
    if os.fork() == 0:
        os.close(go[1])
        os.write(ready[1], b"r")
        os.read(go[0], 1)  # returns for all of them when the parent closes its end
        said = {"number": number}
        try:
            storage = Local(path)
            said["attempt"] = attempts.open_attempt(storage, {"number": number})
            try:
                storage.make_prefix("checkpoints/shared")
                said["made"] = True
            except AlreadyExistsError:
                said["made"] = False
            with storage.writer(f"checkpoints/shared/rank-{number:05d}.json") as out:
                out.write(json.dumps(number).encode())
                out.publish()
            try:
                storage.put_if_absent("checkpoints/shared/one.json", json.dumps(number).encode())
                said["won"] = True
            except AlreadyExistsError:
                said["won"] = False
        except BaseException as error:
            said["error"] = repr(error)
        os.write(1, json.dumps(said).encode() + b"\\n")
        os._exit(0)
for _ in range(count):
    os.read(ready[0], 1)
os.close(go[1])
for _ in range(count):
    os.wait()
"""


def test_sixteen_processes_make_the_same_folders_at_once(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "run"
    done = subprocess.run(
        [sys.executable, "-c", RACE, str(path), str(NUM_PROCESSES)], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    said = [json.loads(line) for line in done.stdout.splitlines()]
    assert [one["error"] for one in said if "error" in one] == []
    assert sum(one["made"] for one in said) == 1
    assert sorted(one["attempt"] for one in said) == list(range(1, NUM_PROCESSES + 1))
    shared = path / "checkpoints" / "shared"
    assert {file.name for file in shared.iterdir()} == {
        "one.json",
        *(f"rank-{number:05d}.json" for number in range(NUM_PROCESSES)),
    }
    (winner,) = [one["number"] for one in said if one["won"]]
    assert json.loads((shared / "one.json").read_text()) == winner
