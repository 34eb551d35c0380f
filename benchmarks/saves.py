"""Saves and loads beside the raw disk, `torch.save` and DCP: medians of pairs taken in one process, in turn.

    python benchmarks/saves.py [--mib 1024] [--tensors 64] [--rounds 5] [--path DIR] [--json]

Fresh names each round, deletions outside the clock, one thread for torch; the page cache is warm for loads. Ratios are
medians of the ratios of each round, so a disk that slows down in the middle slows both sides.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

from samerun.checkpoint import Slices, Store
from samerun.checkpoint.save.plan import View, plan_save
from samerun.core.component import Captured
from samerun.core.progress import Progress
from samerun.format.layout import Box, piece
from samerun.format.schema import ComponentEntry
from samerun.format.sealed import seal, to_document
from samerun.ranks.group import Solo
from samerun.ranks.threads import run_ranks
from samerun.storage.memory import Memory


def seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def median_ratio(ours: list[float], theirs: list[float]) -> float:
    return statistics.median(a / b for a, b in zip(ours, theirs, strict=True))


def raw_write(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    with path.open("wb", buffering=0) as file:
        for tensor in tensors.values():
            file.write(tensor.numpy().data)
        os.fsync(file.fileno())


def torch_write(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    with path.open("wb") as file:
        torch.save(tensors, file)
        file.flush()
        os.fsync(file.fileno())


def saves(root: Path, tensors: dict[str, torch.Tensor], rounds: int) -> dict[str, Any]:
    """Durable saves of the same tensors: seconds of each kind, and ratios to ours."""
    state = {"weights": Captured(tensors=tensors)}
    taken: dict[str, list[float]] = {"samerun": [], "raw": [], "torch.save": [], "dcp.save": []}
    for number in range(rounds):
        place = root / f"round-{number}"
        place.mkdir()
        store = Store(place / "run")
        store.open_attempt({})
        kinds: dict[str, Callable[[], object]] = {
            "samerun": lambda store=store: store.save(state, Progress(), facts={}, digests={}).result(),
            "raw": lambda place=place: raw_write(place / "raw", tensors),
            "torch.save": lambda place=place: torch_write(place / "torch.pt", tensors),
            "dcp.save": lambda place=place: dcp.save(
                tensors, storage_writer=dcp.FileSystemWriter(place / "dcp"), no_dist=True
            ),
        }
        names = list(kinds)
        for name in names[number % 4 :] + names[: number % 4]:
            taken[name].append(seconds(kinds[name]))
        shutil.rmtree(place)
    ratios = {f"/ {name}": median_ratio(taken["samerun"], taken[name]) for name in taken if name != "samerun"}
    return {"seconds": {name: statistics.median(values) for name, values in taken.items()}, **ratios}


def loads(root: Path, tensors: dict[str, torch.Tensor], rounds: int) -> dict[str, Any]:
    store = Store(root / "load")
    entry = store.save({"weights": Captured(tensors=tensors)}, Progress(), facts={}, digests={}).result()
    dcp.save(tensors, storage_writer=dcp.FileSystemWriter(root / "load-dcp"), no_dist=True)
    targets = {key: torch.empty_like(tensor) for key, tensor in tensors.items()}

    def ours() -> None:
        with store.open(entry) as checkpoint:
            source = checkpoint.source("weights")
            for key, target in targets.items():
                source.read_into(key, target)

    def theirs() -> None:
        dcp.load(targets, storage_reader=dcp.FileSystemReader(root / "load-dcp"), no_dist=True)

    ours(), theirs()  # warm the cache
    pairs = [(seconds(ours), seconds(theirs)) for _ in range(rounds)]
    mine, other = [a for a, _ in pairs], [b for _, b in pairs]
    shutil.rmtree(root / "load")
    shutil.rmtree(root / "load-dcp")
    return {
        "seconds": {"samerun, verified": statistics.median(mine), "dcp.load": statistics.median(other)},
        "/ dcp.load": median_ratio(mine, other),
    }


def background(root: Path, tensors: dict[str, torch.Tensor], rounds: int) -> dict[str, Any]:
    """What a background save costs a loop of matrix products, and how long the loop is blocked."""
    matrix = torch.randn(512, 512)

    def work(budget: float) -> int:
        end, turns = time.perf_counter() + budget, 0
        while time.perf_counter() < end:
            torch.mm(matrix, matrix)
            turns += 1
        return turns

    state = {"weights": Captured(tensors=tensors)}
    blocked: dict[str, list[float]] = {"samerun": [], "dcp.async_save": []}
    for number in range(rounds):
        place = root / f"background-{number}"
        with Store(place / "run", background_group=Solo()) as store:
            store.open_attempt({})
            for again in range(2):  # the first save takes the memory; the second is what a run pays from then on
                start = time.perf_counter()
                store.save(state, Progress(), facts={}, digests={})
                if again:
                    blocked["samerun"].append(time.perf_counter() - start)
                work(0.2)
                store.settle()
        for again in range(2):
            writer = dcp.FileSystemWriter(place / f"dcp-{again}")
            start = time.perf_counter()
            future: Any = dcp.async_save(tensors, storage_writer=writer, no_dist=True)
            if again:
                blocked["dcp.async_save"].append(time.perf_counter() - start)
            work(0.2)
            future.result()
        shutil.rmtree(place)
    return {
        "blocked seconds": {name: statistics.median(values) for name, values in blocked.items()},
        "blocked / dcp.async_save": median_ratio(blocked["samerun"], blocked["dcp.async_save"]),
    }


def reshard() -> dict[str, Any]:
    """4 → 8 ranks, rows: bytes read for bytes wanted, all ranks together."""
    full = torch.randn(4096, 4096)

    def rows(pieces: int, rank: int) -> Slices:
        start, length = piece(4096, pieces, rank)
        part = full.narrow(0, start, length)
        return Slices(dtype=full.dtype, shape=(4096, 4096), parts={Box((start, 0), (length, 4096)): part})

    storage = Memory()
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
    return {"bytes read / wanted": sum(read for _, read in answers) / sum(wanted for wanted, _ in answers)}


def planning() -> dict[str, Any]:
    """The coordinator's plan for 1,024 tensors on more and more ranks, and the size of what the manifest says of it."""
    shapes = [[8192, 8192], [8192], [1024, 8192], [28672, 8192], [8192, 28672]]
    found: dict[str, Any] = {}
    for ranks in (64, 256, 1024):
        cut = {"mesh": list(range(ranks)), "shape": [ranks], "dims": [0]}
        description = {f"weights/layer.{i}": ("bfloat16", shapes[i % 5], cut) for i in range(1024)}
        views = [View(ranks=tuple(range(ranks)), description=description)]
        found[f"{ranks} ranks, seconds"] = statistics.median(
            seconds(lambda v=views, r=ranks: plan_save(v, r)) for _ in range(3)
        )
        plan = plan_save(views, ranks)
        tensors = {path.split("/", 1)[1]: entry for path, entry in plan.tensors.items()}
        component = to_document(ComponentEntry(plain="none", rank_tensors="none", tensors=tensors))
        size = len(seal({"component": component, "layouts": [to_document(layout) for layout in plan.layouts]}))
        found[f"{ranks} ranks, manifest MB"] = (size + ranks * 2 * 110) / 1e6
    return found  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--mib", type=int, default=1024)
    parser.add_argument("--tensors", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--path", type=Path, default=Path("build/bench"))
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    shutil.rmtree(options.path, ignore_errors=True)
    options.path.mkdir(parents=True)
    each = options.mib * 2**20 // 4 // options.tensors
    tensors = {f"t{n}": torch.randn(each) for n in range(options.tensors)}
    small = {f"s{n}": torch.randn(64) for n in range(10_000)}
    figures = {
        "cores": len(os.sched_getaffinity(0)),
        "load average": os.getloadavg()[0],
        f"durable save, {options.mib} MiB in {options.tensors} tensors": saves(options.path, tensors, options.rounds),
        "durable save, 10,000 small tensors": saves(options.path, small, options.rounds),
        "load, warm cache": loads(options.path, tensors, options.rounds),
        "background save": background(options.path, tensors, options.rounds),
        "reshard 4 → 8": reshard(),
        "planning, 1,024 tensors": planning(),
    }
    shutil.rmtree(options.path)
    sys.stdout.write(json.dumps(figures, indent=None if options.json else 2, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
