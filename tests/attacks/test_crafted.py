"""Files made by someone who knows the format and recomputes every digest: typed errors, bounded memory, no escape."""

from __future__ import annotations

import hashlib
import json
import os
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from attacks.sample_run import As, copy_of, load, sample
from samerun.checkpoint import Store
from samerun.checkpoint.verify import verify_checkpoint
from samerun.core.canonical import canonical_bytes
from samerun.errors import CheckpointError, DamagedError, MismatchError, SchemaError
from samerun.format.sealed import seal
from samerun.storage.local import Local
from samerun.storage.memory import Memory

Change = Callable[[dict[str, Any]], object]
MEMORY_LIMIT_BYTES = 16 * 2**20


class Crafted:
    """The sample run with its newest checkpoint changed and everything about it re-sealed."""

    def __init__(self) -> None:
        self.storage = copy_of(sample())
        self.name = Store(self.storage).catalog().entries[0].name
        self.prefix = f"checkpoints/{self.name}"

    def manifest(self) -> dict[str, Any]:
        tree: dict[str, Any] = json.loads(self.storage.objects[f"{self.prefix}/manifest.json"])
        del tree["self_sha256"]
        return tree

    def change_manifest(self, change: Change) -> None:
        tree = self.manifest()
        change(tree)
        self.storage.preload(f"{self.prefix}/manifest.json", seal(tree))

    def change_index(self, change: Change, rank: int = 0) -> None:
        key = f"{self.prefix}/rank-{rank:05d}.json"
        tree = json.loads(self.storage.objects[key])
        change(tree)
        self.replace(f"rank-{rank:05d}.json", canonical_bytes(tree))

    def replace(self, name: str, data: bytes) -> None:
        """Puts `data` under a file's name and makes the manifest say so."""
        self.storage.preload(f"{self.prefix}/{name}", data)

        def change(tree: dict[str, Any]) -> None:
            entry = next(file for file in tree["files"] if file[0] == name)
            entry[1:] = [len(data), hashlib.sha256(data).hexdigest()]

        self.change_manifest(change)

    def outcome(self) -> Exception:
        """The typed error of a start that tries the newest checkpoint; fails when there is none."""
        store = Store(self.storage)
        catalog = store.catalog()
        assert any(entry.name != self.name for entry in catalog.entries), "the other checkpoint must stay usable"
        for entry in catalog.entries:
            if entry.name == self.name:
                try:
                    load(self.storage, entry)
                except CheckpointError as error:
                    return error
                raise AssertionError("the crafted checkpoint was loaded")
        return DamagedError(next(rejected.reason for rejected in catalog.rejected if rejected.name == self.name))


def first(tree: dict[str, Any]) -> list[Any]:
    """The first file entry of a manifest."""
    entry: list[Any] = tree["files"][0]
    return entry


def an_index(tree: dict[str, Any]) -> list[Any]:
    entry: list[Any] = next(file for file in tree["files"] if file[0].endswith(".json"))
    return entry


def weight(tree: dict[str, Any]) -> list[Any]:
    entry: list[Any] = tree["components"]["weights"]["tensors"]["a"]
    return entry


def layout_of_weight(tree: dict[str, Any]) -> dict[str, Any]:
    layout: dict[str, Any] = tree["layouts"][weight(tree)[2]]
    return layout


MANIFESTS: dict[str, tuple[Change, str]] = {
    "path upwards": (lambda t: first(t).__setitem__(0, "../../run.json"), "files"),
    "absolute path": (lambda t: first(t).__setitem__(0, "/etc/passwd"), "files"),
    "path in a name": (lambda t: first(t).__setitem__(0, "rank-00000.safetensors/../x"), "files"),
    "name with a newline": (lambda t: first(t).__setitem__(0, "rank-00000.json\n"), "files"),
    "negative size": (lambda t: first(t).__setitem__(1, -1), "files"),
    "giant size": (lambda t: first(t).__setitem__(1, 2**62), "the manifest says"),
    "another size of an index": (lambda t: an_index(t).__setitem__(1, 1), "the manifest says 1"),
    "a field of a thousand letters": (lambda t: t.update({"a" * 1000: 1}), "unknown field"),
    "size beyond 64 bits": (lambda t: first(t).__setitem__(1, 2**70), "files"),
    "size as text": (lambda t: first(t).__setitem__(1, "12"), "files"),
    "size as float": (lambda t: first(t).__setitem__(1, 12.0), "files"),
    "size as true": (lambda t: first(t).__setitem__(1, True), "files"),
    "digest in capitals": (lambda t: first(t).__setitem__(2, "A" * 64), "files"),
    "file twice": (lambda t: t["files"].append(t["files"][0]), "2 times"),
    "file of a rank there is not": (lambda t: t["files"].append(["rank-00009.safetensors", 0, "0" * 64]), "names rank"),
    "index gone": (lambda t: t["files"].remove(next(f for f in t["files"] if f[0] == "rank-00001.json")), "names no"),
    "no ranks": (lambda t: t.update(num_ranks=0), "num_ranks"),
    "a million ranks": (lambda t: t.update(num_ranks=1_000_000), "names no rank-00002.json"),
    "more ranks than there can be": (lambda t: t.update(num_ranks=10**12), "num_ranks"),
    "unknown field": (lambda t: t.update(extra=1), "unknown field"),
    "missing field": (lambda t: t.pop("progress"), "progress"),
    "newer schema": (lambda t: t.update(schema="ckpt.v2"), "unknown schema 'ckpt.v2'"),
    "foreign schema": (lambda t: t.update(schema="pickle"), "unknown schema"),
    "no schema": (lambda t: t.pop("schema"), "no schema"),
    "schema of an index": (lambda t: t.update(schema="ckpt.index.v1"), "unknown schema"),
    "negative counter": (lambda t: t["progress"].update(windows=-1), "windows"),
    "counter as float": (lambda t: t["progress"].update(windows=2.5), "windows"),
    "unknown dtype": (lambda t: weight(t).__setitem__(0, "os.system"), "unknown dtype"),
    "negative shape": (lambda t: weight(t).__setitem__(1, [-7]), "tensors"),
    "giant shape": (lambda t: weight(t).__setitem__(1, [2**40]), "in files of"),
    "many dimensions": (lambda t: weight(t).__setitem__(1, [1] * 65), "tensors"),
    "no such layout": (lambda t: weight(t).__setitem__(2, 99), "layout 99"),
    "chunk on a rank there is not": (lambda t: layout_of_weight(t).update(ranks=[7]), "on rank 7"),
    "empty grid": (lambda t: layout_of_weight(t).update(grid=[0]), "grid"),
    "giant grid": (lambda t: layout_of_weight(t).update(grid=[2**40]), "grid"),
    "grid of another rank": (lambda t: layout_of_weight(t).update(grid=[1, 1, 1]), "grid"),
    "neither grid nor boxes": (lambda t: layout_of_weight(t).pop("grid"), "either a grid or boxes"),
    "grid and boxes": (lambda t: layout_of_weight(t).update(boxes=[[[0], [7]]]), "either a grid or boxes"),
    "no ranks in a layout": (lambda t: layout_of_weight(t).update(ranks=[]), "ranks"),
    "another name": (lambda t: t.update(name="u000000009-00000000"), "copied here"),
    "a name upwards": (lambda t: t.update(name="../x"), "name"),
    "component upwards": (lambda t: t["components"].update({"../x": t["components"].pop("rng")}), "components"),
    "gap": (lambda t: (layout_of_weight(t).pop("grid"), layout_of_weight(t).update(boxes=[[[0], [6]]])), "hold 6"),
    "overlap": (
        lambda t: (
            layout_of_weight(t).pop("grid"),
            layout_of_weight(t).update(boxes=[[[0], [4]], [[3], [3]]], ranks=[0, 0]),
        ),
        "overlap",
    ),
    "outside": (
        lambda t: (layout_of_weight(t).pop("grid"), layout_of_weight(t).update(boxes=[[[1], [7]]])),
        "does not lie in",
    ),
    "offsets without lengths": (
        lambda t: (layout_of_weight(t).pop("grid"), layout_of_weight(t).update(boxes=[[[0], [7, 1]]])),
        "offsets and",
    ),
}


@pytest.mark.parametrize("case", MANIFESTS)
def test_a_resealed_manifest_is_refused_by_name_and_reason(case: str) -> None:
    crafted = Crafted()
    change, reason = MANIFESTS[case]
    crafted.change_manifest(change)
    error = crafted.outcome()
    assert "manifest.json" in str(error) or "rank-0" in str(error)
    assert reason in str(error)
    assert len(str(error)) < 600
    assert verify_checkpoint(crafted.storage, crafted.name).problems


def chunk(tree: dict[str, Any]) -> list[Any]:
    """A chunk of some component in an index."""
    entry: list[Any] = next(iter(next(iter(tree["chunks"].values())).values()))[0]
    return entry


INDEXES: dict[str, tuple[Change, str]] = {
    "chunk beyond the file": (lambda t: chunk(t).__setitem__(2, 10**9), "beyond its file"),
    "chunk at a negative byte": (lambda t: chunk(t).__setitem__(2, -8), "chunks"),
    "chunk of another shape": (lambda t: chunk(t).__setitem__(1, [1] * len(chunk(t)[1])), "has no chunk"),
    "chunk gone": (lambda t: t["chunks"].clear(), "has no chunk"),
    "blocks of no bytes": (lambda t: t["file"].update(block_bytes=0), "block_bytes"),
    "blocks of a terabyte": (lambda t: t["file"].update(block_bytes=2**40), "block_bytes"),
    "a head beyond the file": (lambda t: t["file"].update(head_bytes=2**27), "a head of"),
    "a head of a terabyte": (lambda t: t["file"].update(head_bytes=2**40), "head_bytes"),
    "chunk in the head": (lambda t: chunk(t).__setitem__(2, 8), "outside its data"),
    "no block digests": (lambda t: t["file"].update(blocks=""), "block digests"),
    "a digest too many": (lambda t: t["file"].update(blocks=t["file"]["blocks"] * 2), "block digests"),
    "half a digest": (lambda t: t["file"].update(blocks=t["file"]["blocks"][:-1]), "blocks"),
    "digest of other bytes": (lambda t: t["file"].update(blocks="0" * len(t["file"]["blocks"])), "damaged"),
    "file of another rank": (lambda t: t["file"].update(name="rank-00001.safetensors"), "same file"),
    "no file": (lambda t: t.update(file=None), "file"),
    "file upwards": (lambda t: t["file"].update(name="../x"), "name"),
    "another rank": (lambda t: t.update(rank=1), "index of rank 1"),
    "another checkpoint": (lambda t: t.update(checkpoint="u000000001-00000000"), "index of rank 0 of"),
    "giant tensor of its own": (
        lambda t: t["rank_tensors"]["rng"]["r"].__setitem__(1, [2**40]),
        "beyond the file",
    ),
    "own tensor of unknown dtype": (lambda t: t["rank_tensors"]["rng"]["r"].__setitem__(0, "object"), "unknown dtype"),
    "unknown tag": (lambda t: t["plain"].update(rng={"$object": "os.system"}), "unknown tag '$object'"),
    "tag beside a key": (lambda t: t["plain"].update(rng={"$tuple": [], "a": 1}), "unknown tag"),
    "second spelling": (lambda t: t["plain"].update(rng={"$dict": [["n", [2, 0]]]}), "canonical spelling"),
    "dict key twice": (lambda t: t["plain"].update(rng={"$dict": [[1, 0], [1, 0]]}), "different str or int keys"),
    "bytes that are none": (lambda t: t["plain"].update(rng={"$bytes": "%%%"}), "base64"),
    "float that is none": (lambda t: t["plain"].update(rng={"$float": "1.0"}), "no float"),
    "finite float in hex": (lambda t: t["plain"].update(rng={"$float": "3ff0000000000000"}), "canonical spelling"),
    "counter of nothing": (lambda t: t["plain"].update(rng={"$counter": {}}), "dict must be a list"),
    "plain of a component there is not": (lambda t: t["plain"].update(evil=1), "evil"),
}


@pytest.mark.parametrize("case", INDEXES)
def test_a_resealed_index_is_refused_by_name_and_reason(case: str) -> None:
    crafted = Crafted()
    change, reason = INDEXES[case]
    crafted.change_index(change)
    error = crafted.outcome()
    assert crafted.name in str(error)
    assert reason in str(error)
    assert verify_checkpoint(crafted.storage, crafted.name).problems


RAW: dict[str, bytes] = {
    "empty": b"",
    "one byte": b"{",
    "zeros": bytes(4096),
    "not UTF-8": b'{"schema":"\xff"}\n',
    "nested beyond the stack": b"[" * 200_000 + b"]" * 200_000 + b"\n",
    "brackets in a string": b'{"schema":"' + b"[" * 1000 + b'"}\n',
    "NaN": b'{"schema":NaN}\n',
    "infinity by overflow": b'{"schema":1e999}\n',
    "duplicate key": b'{"schema":"ckpt.v1","schema":"ckpt.v1"}\n',
    "a number of a million digits": b'{"schema":' + b"9" * 1_000_000 + b"}\n",
    "an array": b"[]\n",
    "a lone surrogate": b'{"schema":"\\ud800"}\n',
    "pickle": b"\x80\x04\x95\x1d\x00\x00\x00\x00\x00\x00\x00\x8c\x05posix\x94\x8c\x06system\x94\x93\x94.",
}


@pytest.mark.parametrize("case", RAW)
@pytest.mark.parametrize("file", ["manifest.json", "rank-00000.json"])
def test_raw_bytes_in_place_of_a_document_are_refused(case: str, file: str) -> None:
    crafted = Crafted()
    if file == "manifest.json":
        crafted.storage.preload(f"{crafted.prefix}/{file}", RAW[case])
    else:
        crafted.replace(file, RAW[case])
    assert file in str(crafted.outcome())


@pytest.mark.parametrize("spelling", [{"indent": 1}, {"separators": (", ", ": ")}, {"ensure_ascii": True}])
def test_json_that_is_valid_but_not_canonical_is_refused(spelling: dict[str, Any]) -> None:
    crafted = Crafted()
    crafted.change_manifest(lambda tree: tree["facts"].update(name="ä"))
    key = f"{crafted.prefix}/manifest.json"
    tree = json.loads(crafted.storage.objects[key])
    options: dict[str, Any] = {"sort_keys": True, "separators": (",", ":"), "ensure_ascii": False} | spelling
    crafted.storage.preload(key, json.dumps(tree, **options).encode() + b"\n")
    assert "canonical" in str(crafted.outcome())


def test_a_terabyte_header_and_giant_files_cost_no_memory() -> None:
    crafted = Crafted()
    data = bytearray(crafted.storage.objects[f"{crafted.prefix}/rank-00000.safetensors"])
    data[:8] = (2**40).to_bytes(8, "little")
    crafted.replace("rank-00000.safetensors", bytes(data))
    tracemalloc.start()
    problems = verify_checkpoint(crafted.storage, crafted.name).problems
    crafted.outcome()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert any("claims a header of 1099511627776 bytes" in problem for problem in problems)
    assert peak < MEMORY_LIMIT_BYTES


def test_a_document_beyond_the_cap_is_refused_unread(tmp_path: Path) -> None:
    storage = write_out(sample(), tmp_path)
    name = Store(storage).catalog().entries[0].name
    with (tmp_path / "checkpoints" / name / "manifest.json").open("r+b") as file:
        file.truncate(2**40)  # sparse
    catalog = Store(storage).catalog()
    assert "1099511627776 bytes, at most" in catalog.rejected[0].reason
    assert len(catalog.entries) == 1


@pytest.mark.parametrize("kind", ["link", "pipe", "directory", "device"])
@pytest.mark.parametrize("file", ["manifest.json", "rank-00000.json", "rank-00000.safetensors"])
def test_what_is_no_regular_file_is_refused_without_opening_it(tmp_path: Path, kind: str, file: str) -> None:
    storage = write_out(sample(), tmp_path)
    name = Store(storage).catalog().entries[0].name
    path = tmp_path / "checkpoints" / name / file
    original = path.rename(tmp_path / "outside")
    if kind == "link":
        path.symlink_to(original)
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "directory":
        path.mkdir()
    else:
        path.symlink_to("/dev/zero")
    catalog = Store(storage).catalog()
    assert [entry.name for entry in catalog.entries] != []
    assert catalog.rejected[0].name == name
    assert file in catalog.rejected[0].reason
    load(storage, catalog.entries[0])


def test_files_swapped_between_ranks_and_checkpoints_are_refused() -> None:
    base = sample()
    newest, older = (entry.name for entry in Store(base).catalog().entries)
    for file in ("rank-00000.json", "rank-00000.safetensors", "manifest.json"):
        for other in (f"checkpoints/{older}/{file}", f"checkpoints/{newest}/{file.replace('00000', '00001')}"):
            crafted = Crafted()
            name = crafted.name
            data = crafted.storage.objects[other.replace(newest, name).replace(older, _older(crafted))]
            if data == crafted.storage.objects[f"checkpoints/{name}/{file}"]:
                continue
            crafted.storage.preload(f"checkpoints/{name}/{file}", data)
            assert name in str(crafted.outcome())


def _older(crafted: Crafted) -> str:
    return Store(crafted.storage).catalog().entries[1].name


def test_each_missing_file_is_named() -> None:
    base = sample()
    name = Store(base).catalog().entries[0].name
    for key in [key for key in base.objects if key.startswith(f"checkpoints/{name}/")]:
        storage = copy_of(base)
        storage.remove(key)
        rejected = Store(storage).catalog().rejected
        assert [entry.name for entry in rejected] == [name]
        assert key.rsplit("/", 1)[1] in rejected[0].reason or "manifest" in rejected[0].reason


def test_a_foreign_run_record_and_a_lost_one_are_schema_errors() -> None:
    storage = copy_of(sample())
    assert Store(storage).read_run() == {"id": "sample"}
    storage.preload("run.json", b'{"schema":"other"}\n')
    with pytest.raises(SchemaError, match="unknown schema 'other'"):
        Store(storage).read_run()
    storage.remove("run.json")
    with pytest.raises(SchemaError, match=r"no run\.json"):
        Store(storage).read_run()
    assert Store(Memory()).read_run() is None


def test_reading_what_is_not_there_is_a_mismatch() -> None:
    storage = sample()
    store = Store(storage, group=As(0))
    with store.open(store.catalog().entries[0]) as checkpoint:
        with pytest.raises(MismatchError, match="holds no component 'ema'"):
            checkpoint.source("ema")
        with pytest.raises(MismatchError, match="no such tensor"):
            checkpoint.source("weights").read_into("zzz", __import__("torch").zeros(1))


def write_out(storage: Memory, path: Path) -> Local:
    for key, data in storage.objects.items():
        target = path / key
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(data)
    return Local(path)
