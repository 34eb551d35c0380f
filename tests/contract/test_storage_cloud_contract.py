"""Object stores keep the promises of storage: in memory through obstore, on an S3 API and on Azure Blob.

The tests themselves are the ones that directories and dicts pass (`test_store_storage_contract`), asked again here.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable

import obstore
import pytest
from obstore.store import MemoryStore

from contract import test_store_storage_contract as promises
from object_servers import FAST, ObjectServer
from samerun.errors import AlreadyExistsError, NotFoundError, UsageError
from samerun.storage.cloud.requests import Requests
from samerun.storage.cloud.store import TOMBSTONE, Cloud

SMALL_PART = 5 * 2**20
"""The smallest part that S3 accepts in a multipart upload."""


def in_memory(store: MemoryStore | None = None) -> Cloud:
    return Cloud(Requests(store or MemoryStore()), url="memory://bucket/run", patience=FAST)


@pytest.fixture(params=["obstore in memory", "s3", "azure"])
def storage(request: pytest.FixtureRequest) -> Cloud:
    if request.param == "obstore in memory":
        return in_memory()
    server: ObjectServer = request.getfixturevalue(request.param)
    return server.cloud(server.url(), single_request_bytes=SMALL_PART)


_PROMISES: list[Callable[[Cloud], None]] = [
    promises.test_a_published_object_is_read_whole_and_by_ranges,
    promises.test_an_object_written_in_pieces_appears_only_when_published,
    promises.test_a_writer_that_is_left_by_an_error_leaves_nothing,
    promises.test_a_prefix_is_made_once,
    promises.test_put_if_absent_has_one_winner_of_many,
    promises.test_put_if_unchanged_refuses_an_old_version,
    promises.test_what_is_not_there,
    promises.test_a_larger_object_than_expected_is_refused_unread,
    promises.test_discard_takes_all_of_one_prefix_and_nothing_else,
    promises.test_names_are_sorted_and_only_one_level,
    promises.test_an_empty_object,
    promises.test_sizes_of_many_are_asked_at_once_and_the_missing_are_left_out,
]


@pytest.mark.parametrize("promise", _PROMISES, ids=lambda promise: promise.__name__.removeprefix("test_"))
def test_the_promise(storage: Cloud, promise: Callable[[Cloud], None]) -> None:
    promise(storage)


def test_every_promise_is_asked_here_too() -> None:
    asked = {promise.__name__ for promise in _PROMISES} | {"test_keys_that_could_leave_the_root_are_refused"}
    assert asked == {name for name in vars(promises) if name.startswith("test_")}


@pytest.mark.parametrize("key", ["", "/etc/passwd", "a/../b", "..", "a//b", ".hidden", "a/", "ä", "a b", "x" * 2000])
def test_keys_that_could_leave_the_root_are_refused(key: str) -> None:
    promises.test_keys_that_could_leave_the_root_are_refused(in_memory(), key)


def test_equal_bytes_have_one_winner_too(storage: Cloud) -> None:
    storage.put_if_absent("attempts/000001.json", b"same")
    with pytest.raises(AlreadyExistsError, match="another writer"):
        storage.put_if_absent("attempts/000001.json", b"same")


def test_a_large_object_goes_part_by_part(storage: Cloud) -> None:
    storage.make_prefix("p")
    block = secrets.token_bytes(2**20)
    buffer = bytearray(block)
    with storage.writer("p/x") as writer:
        for number in range(13):
            buffer[0] = number
            writer.write(memoryview(buffer))  # reused at once: what was written must not change
        assert storage.names("p") == []
        writer.publish()
    assert storage.size_bytes("p/x") == 13 * 2**20
    reader, target = storage.reader("p/x"), bytearray(3)
    for number in range(13):
        reader.read_into(number * 2**20, memoryview(target))
        assert bytes(target) == bytes([number]) + block[1:3]


def test_a_large_object_that_is_given_up_leaves_nothing(storage: Cloud) -> None:
    storage.make_prefix("p")
    with pytest.raises(ZeroDivisionError), storage.writer("p/x") as writer:
        for _ in range(13):
            writer.write(bytes(2**20))
        raise ZeroDivisionError
    assert storage.names("p") == []
    with pytest.raises(NotFoundError):
        storage.size_bytes("p/x")


def test_an_upload_that_is_given_up_is_aborted(s3: ObjectServer) -> None:
    """Parts that stay are invisible and paid for."""
    storage, before = s3.cloud(s3.url(), single_request_bytes=SMALL_PART), s3.unfinished_uploads()
    storage.make_prefix("p")
    with pytest.raises(ZeroDivisionError), storage.writer("p/x") as writer:
        for _ in range(40):
            writer.write(bytes(2**20))
        assert s3.unfinished_uploads() == before + 1  # else the test could not fail: it had not begun
        raise ZeroDivisionError
    assert s3.unfinished_uploads() == before


def test_a_published_key_is_never_written_again(storage: Cloud) -> None:
    promises.put(storage, "p/x", b"1")
    with pytest.raises(AlreadyExistsError):
        promises.put(storage, "p/x", b"2")
    assert storage.get("p/x", max_bytes=1).data == b"1"


def test_a_discarded_prefix_is_gone_and_whoever_publishes_it_late_loses(storage: Cloud) -> None:
    storage.make_prefix("checkpoints/a")
    promises.put(storage, "checkpoints/a/shard", b"1")
    promises.put(storage, "checkpoints/a/manifest.json", b"2")
    storage.discard("checkpoints/a", "manifest.json")
    assert storage.names("checkpoints") == []
    late = storage.writer("checkpoints/a/manifest.json")
    late.write(b"3")
    with pytest.raises(AlreadyExistsError):
        late.publish()
    promises.put(storage, "checkpoints/a/shard", b"late")  # what is unpublished may lie there
    assert storage.names("checkpoints") == ["a"]
    assert storage.names("checkpoints/a") == ["shard"]
    assert storage.sizes("checkpoints/a", ["manifest.json", "shard"]) == {"shard": 4}
    for look in (storage.size_bytes, storage.reader, lambda key: storage.get(key, max_bytes=1000)):
        with pytest.raises(NotFoundError):
            look("checkpoints/a/manifest.json")
    storage.discard("checkpoints/a", "manifest.json")
    assert storage.names("checkpoints") == []


def test_an_object_of_a_tombstones_size_is_no_tombstone(storage: Cloud) -> None:
    storage.make_prefix("checkpoints/a")
    promises.put(storage, "checkpoints/a/manifest.json", b"x" * len(TOMBSTONE))
    assert storage.names("checkpoints") == ["a"]
    assert storage.names("checkpoints/a") == ["manifest.json"]
    assert storage.size_bytes("checkpoints/a/manifest.json") == len(TOMBSTONE)


def test_sweep_takes_only_old_graves(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = MemoryStore()
    storage = in_memory(memory)
    for name in ("a", "b", "c"):
        storage.make_prefix(f"checkpoints/{name}")
        promises.put(storage, f"checkpoints/{name}/manifest.json", name.encode())
    for name in ("a", "b"):
        storage.discard(f"checkpoints/{name}", "manifest.json")
    promises.put(storage, "checkpoints/b/shard", b"written late")
    obstore.put(memory, ".probes/left", b"")
    assert storage.sweep() == 0
    monkeypatch.setattr("samerun.storage.cloud.store.TOMBSTONE_SECONDS", -1.0)
    assert storage.sweep() == 2
    assert {item["path"] for item in obstore.list(memory).collect()} == {
        "checkpoints/b/manifest.json",
        "checkpoints/b/shard",
        "checkpoints/c/.owner",
        "checkpoints/c/manifest.json",
    }


def test_a_version_that_get_did_not_return_is_refused() -> None:
    with pytest.raises(UsageError, match="no version"):
        in_memory().put_if_unchanged("latest.json", b"1", "yesterday")


def test_an_object_that_another_writer_removed_has_changed() -> None:
    storage = in_memory()
    storage.put_if_absent("latest.json", b"1")
    version = storage.get("latest.json", max_bytes=9).version
    storage.remove("latest.json")
    with pytest.raises(AlreadyExistsError):
        storage.put_if_unchanged("latest.json", b"2", version)


class Forgetful(Requests):
    """A store that ignores the condition of a create, as some S3-compatible servers do."""

    def create(self, key: str, data: bytes, mark: str) -> None:
        obstore.put(self._store, key, data, mode="overwrite", attributes={"samerunwriter": mark})


class Unable(Requests):
    def create(self, key: str, data: bytes, mark: str) -> None:
        raise obstore.exceptions.NotSupportedError("no such condition")


@pytest.mark.parametrize(("kind", "words"), [(Forgetful, "accepted a second create"), (Unable, "no conditional")])
def test_a_store_without_conditional_create_is_refused(kind: type[Requests], words: str) -> None:
    memory = MemoryStore()
    storage = Cloud(kind(memory), url="s3://old/run", patience=FAST)
    for call in (lambda: storage.make_prefix("a"), lambda: storage.put_if_absent("x", b"")):
        with pytest.raises(UsageError, match=words):
            call()
    assert obstore.list(memory).collect() == []  # nothing is left there
    assert storage.names("") == []  # reading is allowed


class Metadataless(Requests):
    """A store that drops metadata, and loses the answer of each first create."""

    def create(self, key: str, data: bytes, mark: str) -> None:
        obstore.put(self._store, key, data, mode="create")
        if not key.startswith("."):
            raise obstore.exceptions.GenericError("connection reset")


def test_without_metadata_a_lost_answer_is_a_lost_race() -> None:
    """Never the other way round: a write that may not be ours is not taken for ours."""
    storage = Cloud(Metadataless(MemoryStore()), url="s3://plain/run", patience=FAST)
    with pytest.raises(AlreadyExistsError):
        storage.put_if_absent("x", b"1")


def test_errors_say_what_and_where() -> None:
    storage = in_memory()
    with pytest.raises(NotFoundError, match=r"reading: .*memory://bucket/run/nothing/x") as caught:
        storage.get("nothing/x", max_bytes=1)
    assert isinstance(caught.value, FileNotFoundError)
    assert "Debug source" not in str(caught.value)
