"""An object store refuses, or loses the answer to, the N-th request of a save, for every N: the old checkpoint stays,
what is loaded is whole, the error has a type. Then writers that compete, and one that wakes up too late."""

from __future__ import annotations

import contextlib
import threading

import obstore
import pytest
import torch
from obstore.store import MemoryStore

from object_servers import FAST
from samerun.checkpoint import Store
from samerun.core.component import Captured
from samerun.core.progress import Progress, Updates, Windows
from samerun.errors import AlreadyExistsError, FencedError, SamerunError, StorageError
from samerun.ranks.threads import ThreadGroup, run_ranks
from samerun.storage.cloud.faulty import Fault, FaultyRequests
from samerun.storage.cloud.requests import Request, Requests, Verb
from samerun.storage.cloud.store import Cloud

PART = 64
"""Shards above this many bytes go part by part: those of these tests do, their indexes and manifests do not."""
SINGLE = 4096


def cloud(requests: Requests) -> Cloud:
    return Cloud(requests, url="memory://bucket/run", patience=FAST, single_request_bytes=SINGLE, wait=lambda _: None)


def sound(memory: MemoryStore) -> Cloud:
    return cloud(Requests(memory))


def save(store: Store, update: int, rank: int = 0) -> str:
    tensors = {"a": torch.full((7,), float(update)), "b": torch.full((2003,), float(update))}
    state = {"weights": Captured(tensors=tensors), "rng": Captured(plain=[update, rank])}
    pending = store.save(state, Progress(windows=Windows(update), updates=Updates(update)), facts={}, tags=["best"])
    return pending.result().name


def newest(memory: MemoryStore) -> int:
    store = Store(sound(memory))
    entry = store.catalog().entries[0]
    with store.open(entry) as checkpoint:
        for key, size in (("a", 7), ("b", 2003)):
            target = torch.zeros(size)
            checkpoint.source("weights").read_into(key, target)
            assert target.tolist() == [entry.progress.updates.value] * size
    return entry.progress.updates.value


def prepared(size: int = 1) -> MemoryStore:
    memory = MemoryStore()
    run_ranks(size, lambda group: save(Store(sound(memory), group=group, keep_last=1), 1, group.rank))
    return memory


def faulty(
    memory: MemoryStore, at: int | None, fault: Fault = Fault.REFUSED, *, lasting: bool = False
) -> FaultyRequests:
    return FaultyRequests(memory, at=at, fault=fault, lasting=lasting, part_bytes=PART)


def requests_of_a_save(size: int) -> int:
    memory = prepared(size)
    counting = faulty(memory, None)
    storage = cloud(counting)
    run_ranks(size, lambda group: save(Store(storage, group=group, keep_last=1), 2, group.rank))
    return counting.num_requests


@pytest.mark.parametrize("fault", list(Fault), ids=lambda fault: fault.value)
@pytest.mark.parametrize("lasting", [False, True], ids=["once", "from then on"])
def test_a_request_that_fails_costs_nothing_that_was_published(fault: Fault, lasting: bool) -> None:
    count = requests_of_a_save(1)
    assert count > 20
    outcomes = set()
    failed: set[Verb] = set()
    for at in range(count):
        memory = prepared()
        requests = faulty(memory, at, fault, lasting=lasting)
        store = Store(cloud(requests), keep_last=1)
        try:
            save(store, 2)
            outcomes.add("saved")
            assert newest(memory) == 2, at
        except StorageError as error:
            outcomes.add("refused")
            assert "planned" in str(error) or "unknown whether it was written" in str(error)
            assert newest(memory) in (1, 2), at
        assert requests.failed, "the fault never happened"
        assert requests.num_requests < 10 * count, "retries are bounded"
        failed |= {request.verb for request in requests.failed}
        requests.heal()
        save(store, 3)
        assert newest(memory) == 3
        catalog = Store(sound(memory)).catalog()
        assert [entry.progress.updates.value for entry in catalog.entries] == [3]
        assert catalog.rejected == (), at  # leftovers are gone
    assert outcomes == {"saved", "refused"}
    assert failed >= {Verb.CREATE, Verb.REPLACE, Verb.UPLOAD, Verb.READ, Verb.LIST, Verb.DELETE}
    assert (Verb.LOOK in failed) == lasting  # only asked whose write it was once another request had failed


@pytest.mark.parametrize("fault", list(Fault), ids=lambda fault: fault.value)
def test_a_tag_that_cannot_be_read_for_a_moment_still_keeps_its_checkpoint(fault: Fault) -> None:
    count = requests_of_a_save(1)
    for at in range(count):
        memory = MemoryStore()
        store = Store(sound(memory), keep_last=1)
        save(store, 1)
        store.tag("golden", store.catalog().entries[0])
        with contextlib.suppress(StorageError):
            save(Store(cloud(faulty(memory, at, fault)), keep_last=1), 2)
        assert 1 in [entry.progress.updates.value for entry in Store(sound(memory)).catalog().entries], at


def test_a_lost_answer_to_a_write_is_no_failure() -> None:
    """Whatever single conditional write or upload loses its answer, reading back settles it: the save succeeds."""
    memory = prepared()
    counting = Listening(memory)
    save(Store(cloud(counting), keep_last=1), 2)
    settled = {Verb.CREATE, Verb.REPLACE, Verb.UPLOAD}
    numbers = [n for n, request in enumerate(counting.asked) if request.verb in settled and request.key[0] != "."]
    assert len(numbers) >= 6  # attempt, prefix, shard, index, manifest, tag, latest
    for at in numbers:
        memory = prepared()
        requests = faulty(memory, at, Fault.LOST)
        save(Store(cloud(requests), keep_last=1), 2)
        assert [request.verb in settled for request in requests.failed] == [True]
        assert newest(memory) == 2


class Listening(Requests):
    def __init__(self, memory: MemoryStore) -> None:
        super().__init__(memory, part_bytes=PART)
        self.asked: list[Request] = []

    def before(self, request: Request) -> None:
        self.asked.append(request)


@pytest.mark.parametrize("size", [1, 4])
def test_looking_at_one_checkpoint_costs_four_requests_however_many_ranks_wrote_it(size: int) -> None:
    memory = prepared(size)
    listening = Listening(memory)
    store = Store(cloud(listening))
    catalog = store.catalog()
    found = sorted(request.verb.value for request in listening.asked)  # the run's two folders, then one of each
    assert found == sorted(verb.value for verb in (Verb.LIST, Verb.LIST, Verb.READ, Verb.LIST))
    listening.asked.clear()
    with store.open(catalog.entries[0]):
        assert [request.verb for request in listening.asked] == [Verb.READ, Verb.LIST, Verb.READ]  # the last: an index


def test_on_two_ranks_the_failure_of_one_is_the_failure_of_both() -> None:
    count = requests_of_a_save(2)
    for at in range(0, count, 3):
        memory = prepared(2)
        storage = cloud(faulty(memory, at, Fault.REFUSED))

        def body(group: ThreadGroup, storage: Cloud = storage) -> str:
            try:
                save(Store(storage, group=group, keep_last=1), 2, group.rank)
            except SamerunError as error:
                return type(error).__name__
            return "saved"

        assert len(set(run_ranks(2, body))) == 1, at
        assert newest(memory) in (1, 2)


@pytest.mark.parametrize("fault", list(Fault), ids=lambda fault: fault.value)
def test_reading_from_a_failing_store_is_a_named_error(fault: Fault) -> None:
    memory = prepared()
    counting = faulty(memory, None)
    load(Store(cloud(counting)))
    for at in range(counting.num_requests):
        with pytest.raises(SamerunError, match="planned"):
            load(Store(cloud(faulty(memory, at, fault))))


def load(store: Store) -> None:
    catalog = store.catalog()
    if catalog.rejected:
        raise StorageError(5, catalog.rejected[0].reason)
    with store.open(catalog.entries[0]) as checkpoint:
        checkpoint.source("weights").read_into("a", torch.zeros(7))


def test_many_attempts_at_once_get_a_number_each() -> None:
    memory = MemoryStore()
    numbers: list[int] = []

    def begin() -> None:
        numbers.append(Store(sound(memory)).open_attempt({"same": "facts"}))

    threads = [threading.Thread(target=begin) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(numbers) == [1, 2, 3, 4, 5, 6]


class Noted(Requests):
    """Writes down what was asked to be written, in order."""

    def __init__(self, memory: MemoryStore) -> None:
        super().__init__(memory, part_bytes=PART)
        self.written: list[str] = []

    def before(self, request: Request) -> None:
        if request.verb in (Verb.CREATE, Verb.REPLACE, Verb.OVERWRITE, Verb.UPLOAD):
            self.written.append(request.key)


@pytest.mark.parametrize("size", [1, 3])
def test_the_manifest_is_written_after_all_data_and_pointers_after_the_manifest(size: int) -> None:
    memory = prepared(size)
    noted = Noted(memory)
    storage = cloud(noted)
    run_ranks(size, lambda group: save(Store(storage, group=group, keep_last=1), 2, group.rank))
    of_checkpoint = [key for key in noted.written if "checkpoints/u000000002-" in key]
    pointers = [key for key in noted.written if key.endswith(("latest.json", "tags/best.json"))]
    manifest = [key for key in of_checkpoint if key.endswith("manifest.json")]
    assert len(manifest) == 1 and len({key for key in of_checkpoint if "/rank-" in key}) > size
    assert of_checkpoint[-1] == manifest[0]
    assert sorted(pointers) == ["latest.json", "tags/best.json"]
    assert min(noted.written.index(key) for key in pointers) > noted.written.index(manifest[0])


class Asleep(Requests):
    """Sleeps at its manifest until it is woken, as a machine that was suspended right after the fence was checked."""

    def __init__(self, memory: MemoryStore) -> None:
        super().__init__(memory)
        self.sleeps = threading.Event()
        self.wakes = threading.Event()

    def before(self, request: Request) -> None:
        if request.verb is Verb.CREATE and request.key.endswith("manifest.json"):
            self.sleeps.set()
            assert self.wakes.wait(60)


def test_a_zombie_that_wakes_up_at_its_manifest_changes_nothing() -> None:
    memory = prepared()
    asleep, outcome = Asleep(memory), []

    def zombie() -> None:
        try:
            save(Store(cloud(asleep), keep_last=1), 2)
        except SamerunError as error:
            outcome.append(error)

    thread = threading.Thread(target=zombie)
    thread.start()
    assert asleep.sleeps.wait(60)
    newer = Store(sound(memory), keep_last=1)
    save(newer, 3)  # opens a newer attempt, publishes, and clears away what the zombie never finished
    before = _everything(memory)
    asleep.wakes.set()
    thread.join()
    assert [type(error) for error in outcome] == [AlreadyExistsError]
    assert newest(memory) == 3
    assert _everything(memory) == before
    catalog = Store(sound(memory)).catalog()
    assert ([entry.progress.updates.value for entry in catalog.entries], catalog.rejected) == ([3], ())


def test_an_older_attempt_saves_nothing_more() -> None:
    memory = prepared()
    older, newer = Store(sound(memory), keep_last=1), Store(sound(memory), keep_last=1)
    save(older, 2)
    save(newer, 3)
    before = _everything(memory)
    with pytest.raises(FencedError, match="attempt 3 has started"):
        save(older, 4)
    assert _everything(memory) == before


def _everything(memory: MemoryStore) -> dict[str, bytes]:
    """All objects but probes and tombstones of the zombie's own that its clean-up writes again."""
    paths = [item["path"] for item in obstore.list(memory).collect()]
    return {path: bytes(obstore.get(memory, path).bytes()) for path in paths if not path.startswith(".")}
