"""Where scalars go: a protocol of two methods, JSON lines, TensorBoard where it is installed."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from samerun.errors import UsageError
from samerun.health.records.writer import RecordWriter


class Sink(Protocol):
    """Anything that takes named numbers at a step. A new kind of sink is a class with these two methods."""

    def write(self, step: int, scalars: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


class JsonlSink:
    """One JSON object a step, written off the training's path; non-finite numbers become their names."""

    def __init__(self, path: str | Path) -> None:
        self._writer = RecordWriter(Path(path))

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        self._writer.write(partial(_line, step, dict(scalars)))

    def close(self) -> None:
        self._writer.close()


def _line(step: int, scalars: Mapping[str, float]) -> bytes:
    values = {name: value if math.isfinite(value) else str(value) for name, value in scalars.items()}
    return json.dumps({"step": step, **values}).encode() + b"\n"


class TensorBoardSink:
    """Event files for TensorBoard. Raises UsageError where the tensorboard package is not installed."""

    def __init__(self, folder: str | Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise UsageError(
                "TensorBoardSink needs the package tensorboard: pip install tensorboard, or use JsonlSink"
            ) from error
        self._writer: Any = SummaryWriter(str(folder))

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        for name, value in scalars.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()
