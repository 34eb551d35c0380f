"""Saves and loads beside the raw disk, `torch.save` and DCP: medians of pairs taken in one process, in turn.

    python benchmarks/saves.py [--mib 1024] [--tensors 64] [--rounds 5] [--quiet-seconds 0] [--path DIR] [--json]

Fresh names each round, deletions outside the clock, one thread for torch; the page cache is warm for loads. Ratios are
medians of the ratios of each round, so a disk that slows down in the middle slows both sides. `cpu` is processor time
of all threads, which a busy machine changes less than the wall's. With `--quiet-seconds` each round waits, at most so
long, until the machine has been idle for a second; how many rounds found it so is printed.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import sys
import time
import tracemalloc
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

from samerun.checkpoint import Slices, Store
from samerun.checkpoint.save.plan import View, plan_save
from samerun.checkpoint.verify import verify_checkpoint
from samerun.core.component import Captured
from samerun.core.progress import Progress
from samerun.format.layout import Box, piece
from samerun.format.schema import ComponentEntry
from samerun.format.sealed import seal, to_document
from samerun.ranks.group import Solo
from samerun.ranks.threads import run_ranks
from samerun.storage.local import Local

Tensors = dict[str, torch.Tensor]
Work = Callable[[], object]


@dataclass
class Quiet:
    """Waits for an idle machine before a round, and counts the rounds that got one."""

    wait_seconds: float
    num_rounds: int = 0
    num_quiet: int = 0

    def round(self) -> None:
        self.num_rounds += 1
        end = time.monotonic() + self.wait_seconds
        while True:
            is_idle = self._idle_share() > 0.9
            if is_idle or time.monotonic() >= end:
                self.num_quiet += is_idle
                return

    @staticmethod
    def _idle_share() -> float:
        def ticks() -> tuple[int, int]:
            values = [int(word) for word in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]]
            return values[3] + values[4], sum(values)

        before = ticks()
        time.sleep(1)
        after = ticks()
        return (after[0] - before[0]) / max(1, after[1] - before[1])


@dataclass
class Taken:
    """What several ways of doing the same took, round by round: (wall, processor) seconds by name."""

    seconds: dict[str, list[tuple[float, float]]] = field(default_factory=dict)

    def round(self, ways: dict[str, Work], number: int) -> None:
        """All of them once, each round beginning with another."""
        names = list(ways)
        for name in names[number % len(names) :] + names[: number % len(names)]:
            wall, processor = time.perf_counter(), time.process_time()
            ways[name]()
            taken = time.perf_counter() - wall, time.process_time() - processor
            self.seconds.setdefault(name, []).append(taken)

    def figures(self, *ours: str) -> dict[str, Any]:
        """Medians of each, and of `ours` / each other round by round."""
        found: dict[str, Any] = {
            name: {"wall": median(pair[0] for pair in pairs), "cpu": median(pair[1] for pair in pairs)}
            for name, pairs in self.seconds.items()
        }
        for mine in ours:
            for other, pairs in self.seconds.items():
                if other not in ours:
                    ratios = zip(self.seconds[mine], pairs, strict=True)
                    found[f"{mine} / {other}"] = median(a[0] / b[0] for a, b in ratios)
        return found


def median(values: Any) -> float:
    return round(statistics.median(values), 4)


def raw_write(path: Path, tensors: Tensors) -> None:
    with path.open("wb", buffering=0) as file:
        for tensor in tensors.values():
            file.write(tensor.numpy().data)
        os.fsync(file.fileno())


def torch_write(path: Path, tensors: Tensors) -> None:
    with path.open("wb") as file:
        torch.save(tensors, file)
        file.flush()
        os.fsync(file.fileno())


def saves(root: Path, tensors: Tensors, rounds: int, quiet: Quiet) -> dict[str, Any]:
    """Durable saves of the same tensors."""
    state, taken = {"weights": Captured(tensors=tensors)}, Taken()
    for number in range(rounds):
        place = root / f"round-{number}"
        place.mkdir()
        store = Store(place / "run")
        store.open_attempt({})
        quiet.round()
        taken.round(
            {
                "samerun": lambda store=store: store.save(state, Progress(), facts={}).result(),
                "raw": lambda place=place: raw_write(place / "raw", tensors),
                "torch.save": lambda place=place: torch_write(place / "torch.pt", tensors),
                "dcp.save": lambda place=place: dcp.save(
                    tensors, storage_writer=dcp.FileSystemWriter(place / "dcp"), no_dist=True
                ),
            },
            number,
        )
        shutil.rmtree(place)
    return taken.figures("samerun")


def loads(root: Path, tensors: Tensors, rounds: int, quiet: Quiet) -> dict[str, Any]:
    """Into tensors that are there. By blocks; and after the SHA-256 of every file; DCP verifies nothing."""
    store = Store(root / "load")
    entry = store.save({"weights": Captured(tensors=tensors)}, Progress(), facts={}).result()
    dcp.save(tensors, storage_writer=dcp.FileSystemWriter(root / "load-dcp"), no_dist=True)
    targets = {key: torch.empty_like(tensor) for key, tensor in tensors.items()}

    def by_blocks() -> None:
        with store.open(entry) as checkpoint:
            source = checkpoint.source("weights")
            for key, target in targets.items():
                source.read_into(key, target)

    def by_files() -> None:
        assert not verify_checkpoint(Local(root / "load"), entry.name).problems
        by_blocks()

    def by_dcp() -> None:
        dcp.load(targets, storage_reader=dcp.FileSystemReader(root / "load-dcp"), no_dist=True)

    ways: dict[str, Work] = {"blocks": by_blocks, "sha256 of every file": by_files, "dcp.load": by_dcp}
    Taken().round(ways, 0)  # warms the cache
    taken = Taken()
    for number in range(rounds):
        quiet.round()
        taken.round(ways, number)
    shutil.rmtree(root / "load")
    shutil.rmtree(root / "load-dcp")
    return taken.figures("blocks", "sha256 of every file")


WINDOWS = 12
SAVE_EACH = 4


def background(root: Path, tensors: Tensors, rounds: int, quiet: Quiet) -> dict[str, Any]:
    """A loop of matrix products with a save each fourth window, and the same loop without.

    A window is a fixed number of products that take four times as long as copying the tensors once, and then the place
    where an optimizer would step: there a late copy is waited for, as `Run` does. What a save costs: (wall of the loop
    with saves, the last one settled − wall without) / saves; `blocked` is the part in which the loop stood still: the
    call and that wait. DCP's caller has to wait for the save before, as every user of it must.
    """
    matrix = torch.randn(512, 512)
    copies = {key: torch.empty_like(tensor) for key, tensor in tensors.items()}

    def copy() -> None:
        for key, tensor in tensors.items():
            copies[key].copy_(tensor)

    def products(count: int) -> None:
        for _ in range(count):
            torch.mm(matrix, matrix)

    copy(), products(20)
    copy_seconds = statistics.median(wall(copy) for _ in range(5))
    count = max(1, int(4 * copy_seconds / (wall(lambda: products(50)) / 50)))
    blocked: dict[str, list[float]] = {}
    taken = Taken()

    def loop(name: str, save: Work, settle: Work, fence: Work = lambda: None) -> None:
        for window in range(WINDOWS):
            saves_now = window % SAVE_EACH == 0
            stopped = wall(save) if saves_now else 0.0
            products(count)
            stopped += wall(fence)
            if saves_now:
                blocked.setdefault(name, []).append(stopped)
        settle()

    state = {"weights": Captured(tensors=tensors)}
    with Store(root / "background", background_group=Solo(), keep_last=1) as store:
        store.open_attempt({})
        store.save(state, Progress(), facts={}).result()  # takes the memory; the others are what a run pays
        for number in range(rounds):
            place, pending = root / f"background-{number}", []

            def theirs(place: Path = place, pending: list[Any] = pending) -> None:
                if pending:
                    pending[-1].result()
                writer = dcp.FileSystemWriter(place / str(len(pending)))
                pending.append(dcp.async_save(tensors, storage_writer=writer, no_dist=True))

            quiet.round()
            ways: dict[str, Work] = {
                "without": lambda: loop("without", lambda: None, lambda: None),
                "samerun": lambda: loop(
                    "samerun",
                    lambda: store.save(state, Progress(), facts={}, late=["weights"]),
                    store.settle,
                    store.fence,
                ),
                "samerun, all copied at once": lambda: loop(
                    "samerun, all copied at once", lambda: store.save(state, Progress(), facts={}), store.settle
                ),
                "dcp.async_save": lambda save=theirs, last=pending: loop(  # type: ignore[misc]
                    "dcp.async_save", save, lambda: last[-1].result()
                ),
            }
            taken.round(ways, number)
            shutil.rmtree(place)
    num_saves = WINDOWS // SAVE_EACH
    cost = {
        name: median(
            (mine[0] - bare[0]) / num_saves for mine, bare in zip(pairs, taken.seconds["without"], strict=True)
        )
        for name, pairs in taken.seconds.items()
        if name != "without"
    }
    stopped = {name: median(blocked[name]) for name in cost}
    return {
        "copy, seconds": round(copy_seconds, 4),
        "cost of a save, seconds": cost,
        "blocked, seconds": stopped,
        "cost / dcp.async_save": round(cost["samerun"] / cost["dcp.async_save"], 4),
        "blocked / dcp.async_save": round(stopped["samerun"] / stopped["dcp.async_save"], 4),
    }


def wall(work: Work) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def reshard(root: Path) -> dict[str, Any]:
    """4 → 8 ranks, rows: bytes read for bytes wanted, all ranks together; the most memory that one of them took."""
    full = torch.randn(8192, 4096)

    def rows(pieces: int, rank: int) -> Slices:
        start, length = piece(len(full), pieces, rank)
        part = full.narrow(0, start, length)
        return Slices(dtype=full.dtype, shape=tuple(full.shape), parts={Box((start, 0), tuple(part.shape)): part})

    storage = Local(root / "reshard")
    run_ranks(
        4,
        lambda group: (
            Store(storage, group=group)
            .save({"weights": Captured(tensors={"w": rows(4, group.rank)})}, Progress(), facts={})  # type: ignore[dict-item]
            .result()
        ),
    )

    def load(group: Any) -> tuple[int, int]:
        store = Store(storage, group=group)
        with store.open(store.catalog().entries[0]) as checkpoint:
            checkpoint.source("weights").read_into("w", rows(8, group.rank))
            return checkpoint.reads.wanted_bytes, checkpoint.reads.read_bytes

    answers = run_ranks(8, load)
    tracemalloc.start()
    run_ranks(1, load)  # all of the tensor, on one rank
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    shutil.rmtree(root / "reshard")
    return {
        "bytes read / wanted": sum(read for _, read in answers) / sum(wanted for wanted, _ in answers),
        "peak extra memory of a rank, MiB": round(peak_bytes / 2**20, 1),
    }


def planning() -> dict[str, Any]:
    """The coordinator's plan for 1,024 tensors on more and more ranks, and the size of what the manifest says of it."""
    shapes = [[8192, 8192], [8192], [1024, 8192], [28672, 8192], [8192, 28672]]
    found: dict[str, Any] = {}
    for ranks in (64, 256, 1024):
        cut = {"mesh": list(range(ranks)), "shape": [ranks], "dims": [0]}
        description = {f"weights/layer.{i}": ("bfloat16", shapes[i % 5], cut) for i in range(1024)}
        views = [View(ranks=tuple(range(ranks)), description=description)]
        taken = Taken()
        for _ in range(3):
            taken.round({"plan": lambda v=views, r=ranks: plan_save(v, r)}, 0)  # type: ignore[misc]
        found[f"{ranks} ranks, seconds"] = taken.figures()["plan"]
        plan = plan_save(views, ranks)
        tensors = {path.split("/", 1)[1]: entry for path, entry in plan.tensors.items()}
        component = to_document(ComponentEntry(plain="none", rank_tensors="none", tensors=tensors))
        size = len(seal({"component": component, "layouts": [to_document(layout) for layout in plan.layouts]}))
        found[f"{ranks} ranks, manifest MB"] = round((size + ranks * 2 * 110) / 1e6, 3)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--mib", type=int, default=1024)
    parser.add_argument("--tensors", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quiet-seconds", type=float, default=0)
    parser.add_argument("--only", nargs="*", default=["saves", "small", "loads", "background", "reshard", "planning"])
    parser.add_argument("--path", type=Path, default=Path("build/bench"))
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    shutil.rmtree(options.path, ignore_errors=True)
    options.path.mkdir(parents=True)
    root, rounds, quiet = options.path, options.rounds, Quiet(options.quiet_seconds)
    each = options.mib * 2**20 // 4 // options.tensors
    tensors = {f"t{n}": torch.randn(each) for n in range(options.tensors)}
    small = {f"s{n}": torch.randn(64) for n in range(10_000)}
    figures: dict[str, Any] = {"cores": len(os.sched_getaffinity(0)), "load average before": os.getloadavg()[0]}
    work: dict[str, tuple[str, Callable[[], dict[str, Any]]]] = {
        "saves": (
            f"durable save, {options.mib} MiB in {options.tensors} tensors",
            lambda: saves(root, tensors, rounds, quiet),
        ),
        "small": ("durable save, 10,000 small tensors", lambda: saves(root, small, rounds, quiet)),
        "loads": ("load, warm cache", lambda: loads(root, tensors, rounds, quiet)),
        "background": ("background save", lambda: background(root, tensors, rounds, quiet)),
        "reshard": ("reshard 4 → 8", lambda: reshard(root)),
        "planning": ("planning, 1,024 tensors", planning),
    }
    for name in options.only:
        title, measure = work[name]
        figures[title] = measure()
    figures |= {"load average after": os.getloadavg()[0], "quiet rounds": f"{quiet.num_quiet} of {quiet.num_rounds}"}
    shutil.rmtree(options.path)
    sys.stdout.write(json.dumps(figures, indent=None if options.json else 2, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
