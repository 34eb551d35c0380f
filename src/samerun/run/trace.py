"""What a rank holds at each edge, digest by digest, for drills to compare with the twin's. Written only when asked."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from samerun.core.component import Component
from samerun.core.progress import Progress
from samerun.state.fingerprint import fingerprint

EDGE = "edge"
RESTORED = "restored"


class Trace:
    """One file an attempt and rank; a line an edge. Capturing changes nothing in the run."""

    def __init__(self, folder: Path | None, *, attempt: int, rank: int) -> None:
        self._descriptor: int | None = None
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            path = folder / f"attempt-{attempt:06d}.rank-{rank:05d}.jsonl"
            self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    @property
    def is_on(self) -> bool:
        return self._descriptor is not None

    def edge(self, progress: Progress, components: Sequence[Component]) -> None:
        self._write(EDGE, progress, components, None)

    def restored(
        self, progress: Progress, components: Sequence[Component], saved: Mapping[str, Mapping[str, str]]
    ) -> None:
        """Right after a restore, before anything else: what is held now beside what the checkpoint said of itself."""
        self._write(RESTORED, progress, components, saved)

    def close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _write(
        self,
        kind: str,
        progress: Progress,
        components: Sequence[Component],
        saved: Mapping[str, Mapping[str, str]] | None,
    ) -> None:
        if self._descriptor is None:
            return
        held = {component.name: fingerprint(component.capture()) for component in components}
        line = {"kind": kind, "progress": progress.to_json(), "held": held}
        if saved is not None:
            line["saved"] = {name: dict(digests) for name, digests in saved.items()}
        os.write(self._descriptor, json.dumps(line).encode() + b"\n")
