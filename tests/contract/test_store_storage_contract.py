"""What samerun asks of every storage, asked of each one that it has."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from samerun.errors import AlreadyExistsError, NotFoundError, SchemaError, StorageError, UsageError
from samerun.storage.api import Storage
from samerun.storage.local import Local
from samerun.storage.memory import Memory

MAKERS: dict[str, Callable[[Path], Storage]] = {
    "local": lambda path: Local(path / "not" / "yet" / "there"),
    "memory": lambda path: Memory(),
}


@pytest.fixture(params=sorted(MAKERS))
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Storage:
    made: Storage = MAKERS[request.param](tmp_path)
    return made


def put(storage: Storage, key: str, data: bytes) -> None:
    with storage.writer(key) as writer:
        writer.write(data)
        writer.publish()


def test_a_published_object_is_read_whole_and_by_ranges(storage: Storage) -> None:
    storage.make_prefix("checkpoints/a")
    put(storage, "checkpoints/a/x", b"0123456789")
    storage.sync("checkpoints/a")
    assert storage.get("checkpoints/a/x", max_bytes=10).data == b"0123456789"
    assert storage.size_bytes("checkpoints/a/x") == 10
    reader = storage.reader("checkpoints/a/x")
    target = bytearray(3)
    reader.read_into(4, memoryview(target))
    assert (bytes(target), reader.size_bytes) == (b"456", 10)
    with pytest.raises(StorageError, match="ends"):
        reader.read_into(8, memoryview(target))
    reader.close()


def test_an_object_written_in_pieces_appears_only_when_published(storage: Storage) -> None:
    storage.make_prefix("p")
    with storage.writer("p/x") as writer:
        writer.write(b"ab")
        writer.write(memoryview(b"cd"))
        assert "x" not in storage.names("p")
        writer.publish()
    assert storage.names("p") == ["x"]
    assert storage.get("p/x", max_bytes=4).data == b"abcd"


def test_a_writer_that_is_left_by_an_error_leaves_nothing(storage: Storage) -> None:
    storage.make_prefix("p")
    with pytest.raises(ZeroDivisionError), storage.writer("p/x") as writer:
        writer.write(b"ab")
        raise ZeroDivisionError
    assert storage.names("p") == []


def test_a_prefix_is_made_once(storage: Storage) -> None:
    storage.make_prefix("checkpoints/a")
    with pytest.raises(AlreadyExistsError):
        storage.make_prefix("checkpoints/a")
    storage.make_prefix("checkpoints/b")


def test_put_if_absent_has_one_winner_of_many(storage: Storage) -> None:
    outcomes: list[str] = []

    def compete(number: int) -> None:
        try:
            storage.put_if_absent("attempts/000001.json", b"%d" % number)
            outcomes.append(f"won {number}")
        except AlreadyExistsError:
            outcomes.append("lost")

    threads = [threading.Thread(target=compete, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    winners = [outcome for outcome in outcomes if outcome != "lost"]
    assert len(winners) == 1
    assert storage.get("attempts/000001.json", max_bytes=10).data == winners[0][4:].encode()
    assert storage.names("attempts") == ["000001.json"]


def test_put_if_unchanged_refuses_an_old_version(storage: Storage) -> None:
    storage.put_if_unchanged("latest.json", b"1", None)
    first = storage.get("latest.json", max_bytes=10)
    storage.put_if_unchanged("latest.json", b"2", first.version)
    for stale in (first.version, None):
        with pytest.raises(AlreadyExistsError):
            storage.put_if_unchanged("latest.json", b"3", stale)
    assert storage.get("latest.json", max_bytes=10).data == b"2"


def test_what_is_not_there(storage: Storage) -> None:
    assert storage.names("") == []
    assert storage.names("nothing") == []
    for look in (storage.size_bytes, storage.reader, lambda key: storage.get(key, max_bytes=1)):
        with pytest.raises(NotFoundError):
            look("nothing/x")
    storage.remove("nothing")
    storage.discard("nothing")
    assert storage.sweep() == 0


def test_a_larger_object_than_expected_is_refused_unread(storage: Storage) -> None:
    storage.put_if_absent("x", b"12345")
    with pytest.raises(SchemaError, match="5 bytes, at most 4"):
        storage.get("x", max_bytes=4)


def test_discard_takes_all_of_one_prefix_and_nothing_else(storage: Storage) -> None:
    for name in ("a", "ab"):
        storage.make_prefix(f"checkpoints/{name}")
        put(storage, f"checkpoints/{name}/x", b"1")
    storage.discard("checkpoints/a")
    assert storage.names("checkpoints") == ["ab"]
    storage.make_prefix("checkpoints/a")
    assert storage.names("checkpoints/a") == []


def test_names_are_sorted_and_only_one_level(storage: Storage) -> None:
    storage.make_prefix("checkpoints/b")
    put(storage, "checkpoints/b/x", b"1")
    storage.put_if_absent("run.json", b"1")
    assert storage.names("") == ["checkpoints", "run.json"]
    assert storage.names("checkpoints") == ["b"]


def test_sizes_of_many_are_asked_at_once_and_the_missing_are_left_out(storage: Storage) -> None:
    storage.make_prefix("checkpoints/b")
    for number in (0, 1, 7):
        put(storage, f"checkpoints/b/x{number}", bytes(number))
    wanted = ["x7", "x0", "gone"]
    assert storage.sizes("checkpoints/b", wanted) == {"x7": 7, "x0": 0}
    assert storage.sizes("checkpoints/b", []) == {}
    assert storage.sizes("checkpoints/nothing", wanted) == {}
    storage.put_if_absent("run.json", b"123")
    assert storage.sizes("", ["run.json"]) == {"run.json": 3}
    with pytest.raises(UsageError, match="not allowed"):
        storage.sizes("checkpoints/b", ["../b/x7"])


@pytest.mark.parametrize("key", ["", "/etc/passwd", "a/../b", "..", "a//b", ".hidden", "a/", "ä", "a b", "x" * 2000])
def test_keys_that_could_leave_the_root_are_refused(storage: Storage, key: str) -> None:
    for call in (storage.make_prefix, storage.writer, storage.reader, storage.discard, storage.remove):
        with pytest.raises(UsageError, match="not allowed"):
            call(key)


def test_an_empty_object(storage: Storage) -> None:
    storage.put_if_absent("x", b"")
    assert storage.get("x", max_bytes=0).data == b""
    assert storage.size_bytes("x") == 0
