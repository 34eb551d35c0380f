"""Documents changed at random by someone who recomputes every digest: each one loads as what it says, or is refused by
a typed error that names the checkpoint; nothing else happens, in bounded time and memory, and the fall-back stays."""

from __future__ import annotations

import copy
import hashlib
import json
import random
import time
import tracemalloc
from typing import Any, Final

import pytest

from attacks.sample_run import copy_of, load, sample
from samerun.checkpoint import Store
from samerun.checkpoint.verify import verify_checkpoint
from samerun.core.canonical import canonical_bytes
from samerun.errors import CheckpointError, SamerunError
from samerun.format.sealed import seal
from samerun.storage.memory import Memory

MEMORY_LIMIT_BYTES: Final = 16 * 2**20
CPU_LIMIT_SECONDS: Final = 5.0
"""A hundred times what one takes; a decoder that can be made to count to 2^62 takes forever."""


def _nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


HOSTILE: Final[list[Any]] = [
    -1, 0, 1, 2, 63, 2**31, 2**40, 2**62, 2**63, 2**64, 2**70, 1.5, -0.0, 1e308, True, False, None, "", "0", "../x",
    "/etc/passwd", "rank-00000.safetensors", "rank-00001.json", "manifest.json", "whole", "float64", "object", "\x00",
    "x" * 100_000, [], {}, [0], [-1], [2**40], [2**62, 2**62], [1] * 65, [1] * 100_000, {"$object": "os.system"},
    {"$tuple": []}, {"$dict": [[1, 2], [1, 3]]}, {"$bytes": "%%"}, {"$float": "nan"}, {"$counter": [["a", 2**70]]},
    _nested(50), _nested(900),
]  # fmt: skip


def places(tree: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The path of every value in a JSON tree, the root left out."""
    found = [path] if path else []
    if isinstance(tree, dict):
        for key in tree:
            found += places(tree[key], (*path, key))
    elif isinstance(tree, list):
        for number, item in enumerate(tree):
            found += places(item, (*path, number))
    return found


def changed(tree: Any, draw: random.Random) -> Any:
    """The tree with one value replaced by a hostile one or by another of its own, removed, doubled or renamed."""
    tree = copy.deepcopy(tree)
    known = places(tree)
    path = draw.choice(known)
    holder = tree
    for step in path[:-1]:
        holder = holder[step]
    last = path[-1]
    kind = draw.randrange(5)
    if kind == 0:
        del holder[last]
    elif kind == 1 and isinstance(holder, list):
        holder.insert(draw.randrange(len(holder) + 1), copy.deepcopy(holder[last]))
    elif kind == 2 and isinstance(holder, dict):
        holder[draw.choice(["../x", "", "a" * 2000, "evil", "$float", "\n", *map(str, holder)])] = holder.pop(last)
    elif kind == 3:
        value = tree
        for step in draw.choice(known):
            value = value[step]
        holder[last] = copy.deepcopy(value)
    else:
        holder[last] = copy.deepcopy(draw.choice(HOSTILE))
    return tree


def resealed(base: Memory, prefix: str, draw: random.Random) -> Memory | None:
    """The run with one document of a checkpoint changed and every digest above it put right; None where no JSON is."""
    storage = copy_of(base)
    manifest = json.loads(storage.objects[f"{prefix}/manifest.json"])
    file = draw.choice(["manifest.json", "rank-00000.json", "rank-00001.json"])
    try:
        if file == "manifest.json":
            manifest = changed(manifest, draw)
        else:
            data = canonical_bytes(changed(json.loads(storage.objects[f"{prefix}/{file}"]), draw))
            entry = next(entry for entry in manifest["files"] if entry[0] == file)
            entry[1:] = [len(data), hashlib.sha256(data).hexdigest()]
            storage.preload(f"{prefix}/{file}", data)
        storage.preload(f"{prefix}/manifest.json", seal(manifest))
    except (ValueError, RecursionError):
        return None  # our own encoder refuses to write it; raw bytes are the other tests' business
    return storage


def outcome(storage: Memory, name: str) -> str:
    """`loaded`, `other state` (what it says is another checkpoint, honestly), or the kind of the refusal."""
    for entry in Store(storage).catalog().entries:
        if entry.name == name:
            try:
                load(storage, entry)
            except AssertionError:
                return "other state"
            except SamerunError as error:
                assert name in str(error), error
                assert len(str(error)) < 2000, error
                return type(error).__name__
            return "loaded"
    reason = next(rejected.reason for rejected in Store(storage).catalog().rejected if rejected.name == name)
    assert name in reason
    assert len(reason) < 2000
    return CheckpointError.__name__


def fuzz(first: int, count: int) -> dict[str, int]:
    base = sample()
    newest = Store(base).catalog().entries[0].name
    outcomes: dict[str, int] = {}
    for seed in range(first, first + count):
        storage = resealed(base, f"checkpoints/{newest}", random.Random(seed))
        if storage is None:
            continue
        watched = seed % 20 == 0
        if watched:
            tracemalloc.start()
        start = time.process_time()
        found = outcome(storage, newest)
        if seed % 5 == 0:
            assert found in ("loaded", "other state") or verify_checkpoint(storage, newest).problems, (seed, found)
        spent = time.process_time() - start
        if watched:
            peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
            assert peak < MEMORY_LIMIT_BYTES, (seed, peak)
        assert spent < CPU_LIMIT_SECONDS, (seed, spent)
        assert any(entry.name != newest for entry in Store(storage).catalog().entries), seed
        outcomes[found] = outcomes.get(found, 0) + 1
    return outcomes


def test_resealed_documents_are_read_as_they_say_or_refused() -> None:
    outcomes = fuzz(0, 300)
    assert outcomes["CheckpointError"] > 50
    assert sum(outcomes.values()) > 250


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_twenty_thousand_resealed_documents() -> None:
    outcomes = fuzz(1_000_000, 20_000)
    assert outcomes["CheckpointError"] > 5_000


def test_the_fuzz_sees_an_error_without_a_type(monkeypatch: pytest.MonkeyPatch) -> None:
    def careless(manifest: Any, files: set[str], where: str) -> None:
        for entry in manifest.components.values():
            for tensor in entry.tensors.values():
                manifest.layouts[tensor.layout].ranks[0]

    monkeypatch.setattr("samerun.checkpoint.catalog._check_tensors", careless)
    with pytest.raises((IndexError, RuntimeError)):
        fuzz(0, 300)
