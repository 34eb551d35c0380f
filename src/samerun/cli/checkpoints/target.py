"""What the commands' arguments mean, and how they answer: one JSON document, or lines for people."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

from samerun.checkpoint.catalog import Catalog, Entry, read_catalog
from samerun.checkpoint.retired import Retirement

if TYPE_CHECKING:
    from samerun.storage.api import Storage


def split_target(target: str) -> tuple[str, str]:
    """`RUN@NAME` as (run, name); the name defaults to the newest."""
    path, _, name = target.rpartition("@") if "@" in target else (target, "", "")
    return path, name


def catalog_of(storage: Storage) -> Catalog:
    return read_catalog(storage)


def describe(entry: Entry, tagged: list[str]) -> dict[str, Any]:
    """An entry as JSON."""
    return {
        "name": entry.name,
        "attempt": entry.epoch,
        "progress": entry.progress.to_json(),
        "ranks": entry.world_size,
        "bytes": entry.num_bytes,
        "tags": tagged,
        "manifest_sha256": entry.manifest_sha256,
    }


def describe_retirement(by: Retirement) -> dict[str, Any]:
    """Who ended a checkpoint's branch, as JSON."""
    target = None if by.target is None else by.target.name
    return {"retired_by": by.written_by, "decision": by.decision, "target": target, "reason": by.reason}


def answer(document: dict[str, Any], lines: list[str], *, as_json: bool) -> None:
    text = json.dumps(document, indent=1, ensure_ascii=False) if as_json else "\n".join(lines)
    sys.stdout.write(text + "\n")
