"""How long a person waits for an answer: commands that only calculate or look, started as from a shell.

    python benchmarks/commands.py [--rounds 9] [--json]

The page cache is warm (one start is thrown away); wall and processor time, medians. Aim: 0.25 s a command.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import time

COMMANDS = {
    "plan memory": "plan memory --params 70e9 --method qlora --device 48GiB",
    "plan interval": "plan interval --save 90s --mtbf 4h",
    "plan layouts, 64 ranks": (
        "plan layouts --layers 32 --hidden 4096 --heads 32 --kv-heads 8 --ffn 14336 --vocab 128256 --seq 4096 "
        "--recompute full --ranks 64 --global 512 --device 80GB"
    ),
    "help": "--help",
}


def answer(arguments: list[str]) -> tuple[float, float]:
    """(wall, processor) seconds of one command."""
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    script = "from samerun.cli.main import main; main()"
    subprocess.run([sys.executable, "-c", script, *arguments], capture_output=True, check=True)
    wall, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    return wall, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    figures = {}
    for name, line in COMMANDS.items():
        answer(line.split())
        rounds = [answer(line.split()) for _ in range(options.rounds)]
        wall, processor = (statistics.median(column) for column in zip(*rounds, strict=True))
        figures[name] = {"wall_seconds": round(wall, 4), "cpu_seconds": round(processor, 4)}
    if options.json:
        print(json.dumps({"schema": "bench.commands.v1", "cores": os.cpu_count(), "figures": figures}))
        return
    print(f"{os.cpu_count()} cores, medians of {options.rounds}")
    for name, figure in figures.items():
        print(f"{name:24} {figure['wall_seconds']:8.3f} s wall {figure['cpu_seconds']:8.3f} s processor")


if __name__ == "__main__":
    main()
