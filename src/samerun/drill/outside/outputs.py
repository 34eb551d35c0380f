"""What a command left in its folder, as leaves: tensors, numbers, texts, each with a path `file/key/key`.

| file | read as |
|---|---|
| `.safetensors` | tensors |
| `.pt .pth .bin .ckpt .tar` | `torch.load(weights_only=True)`; a file that needs more is compared byte by byte |
| `.json` | values |
| `.jsonl .csv` | values, row by row, by the number of the step where rows have one |
| `.distcp` | the archives that DCP puts one after another, by number: their names are in a pickled file |
| anything else, DCP's `.metadata` too | byte by byte: its digest is one leaf |

Nothing here unpickles freely: a file of the user's own program is still a file.
"""

from __future__ import annotations

import csv
import hashlib
import io
import json
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError, safe_open

from samerun.convert.torch_file import decode
from samerun.errors import DamagedError

Leaf = torch.Tensor | str | int | float | bool | None
Leaves = Iterator[tuple[str, Leaf]]

STEP_NAMES: Final = ("step", "update", "global_step", "iteration", "iter")
MAX_FILES: Final = 5000
_IGNORED_SUFFIXES: Final = (".tmp", ".lock", ".log", ".pyc", ".partial")
_IGNORED_PREFIXES: Final = ("events.out.tfevents",)
_CHUNK_BYTES: Final = 1 << 20
_ZIP_END: Final = b"PK\x05\x06"
_ZIP_END_BYTES: Final = 22


_UNREADABLE: Final = (DamagedError, SafetensorError, ValueError, RecursionError, csv.Error)
"""What a reader makes of a file that is not what its name says. A disk that fails, or a fault of ours, is an error."""


class Digest(str):
    """Of bytes that could not be taken apart: equal or not, but not by how much."""

    __slots__ = ()


def files_in(folder: Path) -> list[Path]:
    """Relative paths of everything that counts as output, sorted; at most MAX_FILES of them."""
    found = []
    for root, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if name != "__pycache__")
        found += [Path(root, name).relative_to(folder) for name in names if _counts(name)]
        if len(found) > MAX_FILES:
            break
    return sorted(found)[:MAX_FILES]


def _counts(name: str) -> bool:
    return not name.endswith(_IGNORED_SUFFIXES) and not name.startswith(_IGNORED_PREFIXES)


def leaves(folder: Path, file: Path) -> dict[str, Leaf]:
    """Every leaf of one file. A file that its suffix does not describe is one digest."""
    path = folder / file
    read = _READERS.get(file.suffix.lower())
    if read is not None:
        try:
            return {f"{file}/{key}" if key else str(file): leaf for key, leaf in read(path)}
        except _UNREADABLE:
            pass  # its bytes can still be compared
    return {str(file): _digest(path)}


def _digest(path: Path) -> Digest:
    digest = hashlib.sha256()
    with path.open("rb") as opened:
        while data := opened.read(_CHUNK_BYTES):
            digest.update(data)
    return Digest(digest.hexdigest())


def _safetensors(path: Path) -> Leaves:
    with safe_open(path, framework="pt") as opened:
        for key in opened.keys():  # noqa: SIM118  # not a dict
            yield key, opened.get_tensor(key)


def _torch_save(path: Path) -> Leaves:
    with torch.serialization.safe_globals(_numpy_globals()):
        value = decode(path, path.name)
    yield from flatten(value, "")


def _distcp(path: Path) -> Leaves:
    """An archive ends with its end-of-directory record, 22 bytes without a comment; one inside a tensor's bytes is
    passed over, since what would end there does not load."""
    data, start, number = path.read_bytes(), 0, 0
    found = data.find(_ZIP_END)
    while found >= 0:
        end = found + _ZIP_END_BYTES
        try:
            value = decode(io.BytesIO(data[start:end]), path.name)
        except DamagedError:
            found = data.find(_ZIP_END, found + 1)
            continue
        yield from flatten(value, str(number))
        start, number = end, number + 1
        found = data.find(_ZIP_END, end)
    if start != len(data):
        raise ValueError(f"{len(data) - start} bytes at the end of {path} are no archive")


def _numpy_globals() -> list[Any]:
    """What NumPy's random state, which many scripts save, is made of: arrays, no code."""
    import numpy as np

    multiarray = np._core.multiarray  # type: ignore[attr-defined]
    return [multiarray._reconstruct, np.ndarray, np.dtype, multiarray.scalar, type(np.dtype("uint32")),
            type(np.dtype("float64")), type(np.dtype("int64"))]  # fmt: skip


def _json(path: Path) -> Leaves:
    yield from flatten(json.loads(path.read_text()), "")


def _json_lines(path: Path) -> Leaves:
    yield from _rows(rows_of(path.read_text(), ".jsonl"))


def _csv(path: Path) -> Leaves:
    yield from _rows(rows_of(path.read_text(), ".csv"))


def _rows(rows: list[dict[str, Any]]) -> Leaves:
    """Rows by the update they speak of, the last one where an update was done again; by position where they do not."""
    steps = {step: row for row in rows if (step := step_of(row)) is not None}
    for name, row in (steps or dict(enumerate(rows))).items():
        yield from flatten(row, f"step {name}" if steps else str(name))


def step_of(row: Mapping[str, Any]) -> int | None:
    """The number of the update that a row speaks of; None for a row without one (a final summary, say)."""
    for name in STEP_NAMES:
        if isinstance(row.get(name), (int, float)) and not isinstance(row[name], bool):
            return int(row[name])
    return None


_READERS: Final[Mapping[str, Callable[[Path], Leaves]]] = {
    ".safetensors": _safetensors,
    **dict.fromkeys((".pt", ".pth", ".bin", ".ckpt", ".tar"), _torch_save),
    ".distcp": _distcp,
    ".json": _json,
    ".jsonl": _json_lines,
    ".csv": _csv,
}


def rows_of(text: str, suffix: str) -> list[dict[str, Any]]:
    """Rows of a JSONL or CSV log; a last line that a kill cut is dropped, as is a line that is no row."""
    if suffix == ".csv":
        whole = text[: text.rfind("\n") + 1]
        return [{key: _number(value) for key, value in row.items()} for row in csv.DictReader(io.StringIO(whole))]
    rows = []
    for line in text.splitlines():
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if isinstance(row, dict):
            rows.append(row)
    return rows


def _number(text: str | None) -> str | int | float | None:
    if text is None:
        return None
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def flatten(value: Any, path: str) -> Leaves:
    """Leaves of nested dicts, lists and tuples; empty ones are a leaf, so that losing them shows."""
    if isinstance(value, Mapping) and value:
        for key, item in value.items():
            yield from flatten(item, f"{path}/{key}" if path else str(key))
    elif isinstance(value, (list, tuple)) and value:
        for number, item in enumerate(value):
            yield from flatten(item, f"{path}/{number}" if path else str(number))
    elif isinstance(value, (torch.Tensor, str, int, float, bool)) or value is None:
        yield path, value
    elif hasattr(value, "__array__"):
        yield path, torch.from_numpy(value.__array__().copy())
    else:
        yield path, Digest(repr(value))
