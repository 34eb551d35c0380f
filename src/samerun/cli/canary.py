"""`samerun canary`: is this device's arithmetic what it was?"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from samerun.errors import ExitCode
from samerun.health.corruption.qualify import REPETITIONS, runs_for_detection, share_seen


def register(app: typer.Typer, name: str, summary: str) -> None:
    app.command(name, short_help=summary, epilog="Example: samerun canary --device cuda:0 --golden canary.json")(canary)


def canary(
    device: Annotated[str, typer.Option("--device", help="cpu, cuda, cuda:1, …")] = "cpu",
    dtype: Annotated[str, typer.Option("--dtype", help="float32, bfloat16 or float16.")] = "float32",
    repeat: Annotated[int, typer.Option("--repeat", min=REPETITIONS, help="Runs of each kernel.")] = REPETITIONS,
    golden: Annotated[Path | None, typer.Option("--golden", help="Compare with this file, or begin it.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document on standard output.")] = False,
) -> None:
    """Run the same inputs through the same kernels again and again, and against an earlier result of this device.

    A kernel whose repetitions differ by more than rounding explains is "not qualified", never "pass". Exit code 3 when
    a result was corrupt. A pass excludes frequent corruption only; the last line says how frequent.
    """
    from samerun.health.corruption import canary as tests

    if dtype not in ("float32", "bfloat16", "float16"):
        raise typer.BadParameter(f"--dtype {dtype} is not float32, bfloat16 or float16")
    key = tests.key_of(device, dtype)
    known = tests.read_golden(golden, key) if golden is not None else None
    results = tests.run_canary(device, dtype=dtype, golden=known, repetitions=repeat)
    corrupt = any(result.verdict is tests.Verdict.CORRUPT for result in results)
    unsure = any(result.verdict is tests.Verdict.NOT_QUALIFIED for result in results)
    if golden is not None and known is None and not corrupt:
        tests.write_golden(golden, key, results)
    verdict = "corrupt" if corrupt else "not qualified" if unsure else "pass"
    power = (
        f"excludes, with 95 % confidence, corruption of {share_seen(repeat):.1%} of runs or more; a device that "
        f"corrupts 1 in 1000 takes {runs_for_detection(1e-3)} runs to be seen"
    )
    if as_json:
        document = {
            "schema": tests.SCHEMA,
            "verdict": verdict,
            "key": key,
            "repetitions": repeat,
            "probes": [result.to_json() for result in results],
            "power": power,
        }
        typer.echo(json.dumps(document, indent=1))
    else:
        for result in results:
            against = "also against the golden" if result.had_golden else "no golden yet"
            typer.echo(f"{result.name:<10} {result.verdict.value:<14} {result.qualification.reason}; {against}")
        typer.echo(f"{verdict}: {power}")
    if corrupt:
        raise typer.Exit(int(ExitCode.NEGATIVE))
