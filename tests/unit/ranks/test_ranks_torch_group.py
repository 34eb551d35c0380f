"""The group protocol between real processes: one world of two, every question in turn, and one that leaves."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

PROGRAM = """
import os, sys
from datetime import timedelta
import torch
import torch.distributed as dist
from samerun.errors import PeerError
from samerun.ranks.torch_group import TorchGroup

rank, path = int(sys.argv[1]), sys.argv[2]
torch.set_num_threads(1)
dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=2, timeout=timedelta(seconds=60))
group = TorchGroup(seconds=60)
assert (group.rank, group.size) == (rank, 2)
for value in (None, True, 2**53 + 1, -0.5, "ünï", [], {"a": [rank]}, "x" * 100_000):
    assert group.gather([rank, value]) == [[0, value if value != {"a": [rank]} else {"a": [0]}],
                                           [1, value if value != {"a": [rank]} else {"a": [1]}]]
assert group.gather("long" * (1 + 500 * rank)) == ["long", "long" * 501]  # lengths differ by rank
assert group.broadcast({"from": rank}) == {"from": 0}
assert group.broadcast(None if rank == 0 else object) is None  # what other ranks say is not even looked at
group.barrier()
print("agreed", flush=True)
if rank == 1:
    os._exit(0)  # vanishes
try:
    group.gather("anyone?", seconds=5)
except PeerError as error:
    assert "rank 0: another of the 2 ranks left or said nothing for 5 s" in str(error), error
    print("alone", flush=True)
os._exit(0)
"""


def test_two_processes_agree_and_a_vanished_peer_is_an_error(tmp_path: Path) -> None:
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(rank), str(tmp_path / "store")],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        for rank in range(2)
    ]
    try:
        ended = [process.communicate(timeout=100) for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    assert [out for out, _ in ended] == ["agreed\nalone\n", "agreed\n"], [err for _, err in ended]
