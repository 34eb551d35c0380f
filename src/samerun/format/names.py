"""The only names that may appear in a run's directory, built and recognised in one place.

A name from a file is never used as a path before it has matched one of these patterns, so no path leaves its folder.
"""

from __future__ import annotations

import re
import secrets
from typing import Final

from samerun.errors import UsageError

RUN_FILE: Final = "run.json"
LATEST_FILE: Final = "latest.json"
CHECKPOINTS: Final = "checkpoints"
ATTEMPTS: Final = "attempts"
TAGS: Final = "tags"
RETIRED: Final = "retired"
MANIFEST: Final = "manifest.json"
EXPORT_FILE: Final = "export.json"
"""In a directory of exported weights: what it came from, and that it is no run."""

CHECKPOINT_PATTERN: Final = r"u[0-9]{9,18}-[0-9a-f]{8}"
COMPONENT_PATTERN: Final = r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}"
TAG_PATTERN: Final = r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}"
DATA_FILE_PATTERN: Final = r"rank-[0-9]{5,7}\.safetensors"
INDEX_FILE_PATTERN: Final = r"rank-[0-9]{5,7}\.json"
MAX_KEY_CHARACTERS: Final = 1024

_CHECKPOINT: Final = re.compile(CHECKPOINT_PATTERN)
_COMPONENT: Final = re.compile(COMPONENT_PATTERN)
_TAG: Final = re.compile(TAG_PATTERN)
_ATTEMPT: Final = re.compile(r"([0-9]{6,12})\.json")


def checkpoint_name(updates: int) -> str:
    """A fresh name; the random part keeps two saves of the same update apart and is never reused."""
    return f"u{updates:09d}-{secrets.token_hex(4)}"


def is_checkpoint_name(name: str) -> bool:
    return _CHECKPOINT.fullmatch(name) is not None


def checkpoint_prefix(name: str) -> str:
    return f"{CHECKPOINTS}/{name}"


def data_file(rank: int) -> str:
    return f"rank-{rank:05d}.safetensors"


def index_file(rank: int) -> str:
    return f"rank-{rank:05d}.json"


def attempt_key(number: int) -> str:
    return f"{ATTEMPTS}/{number:06d}.json"


def attempt_number(name: str) -> int | None:
    """The number of an attempt's file; None for anything else that lies there."""
    found = _ATTEMPT.fullmatch(name)
    if found is None or f"{int(found.group(1)):06d}.json" != name:
        return None
    return int(found.group(1))


def tag_key(tag: str) -> str:
    if _TAG.fullmatch(tag) is None:
        raise UsageError(f"tag {tag!r} is not allowed; use up to 64 letters, digits, '_', '.' and '-', like 'best'")
    return f"{TAGS}/{tag}.json"


def checked_component(name: str) -> str:
    if _COMPONENT.fullmatch(name) is None:
        raise UsageError(f"component name {name!r} is not allowed; use up to 64 letters, digits, '_', '.' and '-'")
    return name


def checked_tensor_key(component: str, key: str) -> str:
    """`key`, or UsageError when no reader could hold it: empty, overlong, or not valid Unicode."""
    if not 0 < len(key) <= MAX_KEY_CHARACTERS or not key.isprintable():
        raise UsageError(f"{component}: tensor name {key[:80]!r} is not allowed; use 1 to 1024 printable characters")
    return key


def shard_key(component: str, key: str, offsets: tuple[int, ...] | None) -> str:
    """The name inside a safetensors file: `weights/h.0.w`, and `weights/h.0.w@512,0` for the part that starts there."""
    whole = f"{component}/{key}"
    return whole if offsets is None else f"{whole}@{','.join(map(str, offsets))}"
