"""`samerun doctor`: what this machine offers, and what a storage path really guarantees."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from samerun.core.environ import launcher
from samerun.core.machine import Fact, machine_facts
from samerun.errors import ExitCode
from samerun.storage.opening import is_url
from samerun.storage.probe import Guarantee, probe_path

if TYPE_CHECKING:
    from collections.abc import Sequence


def register(app: typer.Typer, name: str, summary: str) -> None:
    app.command(name, short_help=summary, epilog="Example: samerun doctor s3://bucket/runs")(doctor)


def doctor(
    path: Annotated[str | None, typer.Argument(help="Where a run would live: a directory or a URL.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document on standard output.")] = False,
) -> None:
    """Check this machine and, with PATH, try out there what samerun needs of storage. Leaves nothing behind.

    Exit code 3 when something that is needed is missing.
    """
    guarantees = [] if path is None else probe_path(path)
    folder = None if path is not None and is_url(path) else Path(path or ".").absolute()
    facts = machine_facts(launcher(), folder=folder)
    if any(fact.name == "torch" and fact.good for fact in facts):
        facts.append(_devices())
    missing = [item.name for item in guarantees if item.needed and not item.held]
    missing += [fact.name for fact in facts if fact.name == "torch" and not fact.good]
    if as_json:
        sys.stdout.write(json.dumps(_document(path, guarantees, facts, missing), indent=1, ensure_ascii=False) + "\n")
    else:
        sys.stdout.write("\n".join(_lines(path, guarantees, facts, missing)) + "\n")
    if missing:
        raise typer.Exit(int(ExitCode.NEGATIVE))


def _devices() -> Fact:
    import torch  # only here: everything above answers without it

    if not torch.cuda.is_available():
        return Fact(name="accelerator", good=None, detail="none that torch sees")
    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return Fact(name="accelerator", good=True, detail=f"{len(names)} × {', '.join(sorted(set(names)))}")


def _document(
    path: str | None, guarantees: Sequence[Guarantee], facts: Sequence[Fact], missing: Sequence[str]
) -> dict[str, Any]:
    return {
        "schema": "samerun.doctor.v1",
        "verdict": "unfit" if missing else "fit",
        "path": path,
        "missing": list(missing),
        "storage": [
            {"name": item.name, "needed": item.needed, "held": item.held, "detail": item.detail} for item in guarantees
        ],
        "machine": [{"name": fact.name, "good": fact.good, "detail": fact.detail} for fact in facts],
    }


def _lines(
    path: str | None, guarantees: Sequence[Guarantee], facts: Sequence[Fact], missing: Sequence[str]
) -> list[str]:
    rows = [("this machine", "", "")]
    rows += [(f"  {fact.name}", {True: "ok", False: "look", None: ""}[fact.good], fact.detail) for fact in facts]
    if path is not None:
        rows.append((path, "", ""))
    rows += [(f"  {item.name}", _word(item), item.detail) for item in guarantees]
    width = max(len(name) for name, _, detail in rows if detail)
    lines = [f"{name:<{width}}  {word:<7}  {detail}".rstrip() for name, word, detail in rows]
    if missing:
        lines.append(f"unfit: samerun cannot keep its promises without {', '.join(missing)}")
    return lines


def _word(item: Guarantee) -> str:
    if item.held:
        return "ok"
    return "MISSING" if item.needed else "without"
