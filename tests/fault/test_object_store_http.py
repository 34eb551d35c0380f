"""The same over HTTP: a proxy before a real S3 server spoils request after request of a save and of a load. What
obstore repeats by itself is repeated; what it cannot know is read back; the checkpoint before is never touched."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import pytest
import torch

from fault.http_proxy import Proxy, Spoil, proxy_before
from object_servers import ObjectServer
from samerun.checkpoint import Store
from samerun.core.component import Captured
from samerun.core.progress import Progress, Updates, Windows
from samerun.errors import SamerunError, StorageError
from samerun.storage.cloud.store import Cloud

pytestmark = pytest.mark.timeout(300)

MAX_FACTOR = 10
"""With two repetitions below and three tries above no save may ask more often than this, whatever the store does. Each
request has a time limit, so time is bounded too."""


@pytest.fixture(scope="module")
def proxy(s3: ObjectServer) -> Iterator[Proxy]:
    with proxy_before(s3.endpoint) as started:
        yield started


def save(storage: Cloud, update: int) -> None:
    state = {"weights": Captured(tensors={"a": torch.full((7,), float(update))})}
    store = Store(storage, keep_last=1)
    store.save(state, Progress(windows=Windows(update), updates=Updates(update)), facts={}).result()


def newest(storage: Cloud) -> int:
    store = Store(storage)
    catalog = store.catalog()
    entry = catalog.entries[0]
    with store.open(entry) as checkpoint:
        target = torch.zeros(7)
        checkpoint.source("weights").read_into("a", target)
    assert target.tolist() == [entry.progress.updates.value] * 7
    return entry.progress.updates.value


def through(s3: ObjectServer, proxy: Proxy, url: str, spoil: Spoil) -> Cloud:
    return s3.cloud(url, endpoint=proxy.endpoint, timeout="2s" if spoil is Spoil.STALL else "10s")


def num_requests(s3: ObjectServer, proxy: Proxy) -> int:
    url = s3.url()
    save(s3.cloud(url), 1)
    proxy.plan(Spoil.ERROR, at=None)
    save(through(s3, proxy, url, Spoil.ERROR), 2)
    return proxy.num_requests


def sweep(s3: ObjectServer, proxy: Proxy, spoil: Spoil, *, step: int, lasting: bool = False) -> None:
    """One run, saved again and again through the proxy: each save meets its fault one request further on."""
    count, url = num_requests(s3, proxy), s3.url()
    assert count > 20
    direct = s3.cloud(url)
    save(direct, 1)
    last = 1
    for update, at in enumerate(range(0, count, step), start=2):
        proxy.plan(spoil, at=at, lasting=lasting)
        allowed = {update}
        try:
            save(through(s3, proxy, url, spoil), update)
        except StorageError:
            allowed.add(last)
        assert proxy.num_requests < MAX_FACTOR * count
        # With its short limit a client on a busy machine may give up before it comes to the request that is held back.
        assert proxy.num_spoilt >= 1 or spoil is Spoil.STALL
        last = newest(direct)
        assert last in allowed, at
    save(direct, 1000)
    catalog = Store(direct).catalog()
    assert ([entry.progress.updates.value for entry in catalog.entries], catalog.rejected) == ([1000], ())


def test_the_answer_to_a_request_is_lost(s3: ObjectServer, proxy: Proxy) -> None:
    sweep(s3, proxy, Spoil.LOSE, step=3)  # of every single one: test_every_request_spoilt_in_every_way


@pytest.mark.parametrize("spoil", [spoil for spoil in Spoil if spoil is not Spoil.LOSE], ids=lambda s: s.name.lower())
def test_one_spoilt_request_of_a_save_is_survived(s3: ObjectServer, proxy: Proxy, spoil: Spoil) -> None:
    sweep(s3, proxy, spoil, step=8)


def test_a_store_that_goes_down_in_a_save_costs_nothing_that_was_published(s3: ObjectServer, proxy: Proxy) -> None:
    sweep(s3, proxy, Spoil.THROTTLE, step=6, lasting=True)


@pytest.mark.soak
@pytest.mark.parametrize("lasting", [False, True], ids=["once", "from then on"])
@pytest.mark.parametrize("spoil", [spoil for spoil in Spoil if spoil is not Spoil.CUT], ids=lambda s: s.name.lower())
def test_every_request_spoilt_in_every_way(s3: ObjectServer, proxy: Proxy, spoil: Spoil, lasting: bool) -> None:
    sweep(s3, proxy, spoil, step=1, lasting=lasting)


def spoil_loads(s3: ObjectServer, proxy: Proxy, spoils: Iterable[Spoil]) -> None:
    url = s3.url()
    save(s3.cloud(url), 1)
    proxy.plan(Spoil.ERROR, at=None)
    assert newest(through(s3, proxy, url, Spoil.ERROR)) == 1
    count = proxy.num_requests
    for spoil in spoils:
        for at in range(count):
            proxy.plan(spoil, at=at)
            try:
                assert newest(through(s3, proxy, url, spoil)) == 1
            except IndexError:
                pass  # the catalog said why the only checkpoint is none, and there is no other
            except SamerunError as error:
                assert url in str(error)
            assert proxy.num_spoilt == 1


def test_a_spoilt_request_of_a_load_is_repeated_or_named(s3: ObjectServer, proxy: Proxy) -> None:
    spoil_loads(s3, proxy, [Spoil.THROTTLE, Spoil.CUT])


@pytest.mark.soak
@pytest.mark.parametrize("spoil", [spoil for spoil in Spoil if spoil is not Spoil.CUT], ids=lambda s: s.name.lower())
def test_requests_to_azure_spoilt_in_every_way(azure: ObjectServer, spoil: Spoil) -> None:
    with proxy_before(azure.endpoint) as before:
        sweep(azure, before, spoil, step=3)


@pytest.mark.soak
@pytest.mark.parametrize("spoil", [Spoil.ERROR, Spoil.DROP, Spoil.LOSE], ids=lambda s: s.name.lower())
def test_a_large_upload_spoilt_at_each_of_its_requests_is_whole_or_gone(
    s3: ObjectServer, proxy: Proxy, spoil: Spoil
) -> None:
    """A shard in parts: started, sent, completed, or aborted. Once the store answers again, no parts stay."""
    data = bytes(range(256)) * 2**16

    def upload(url: str, at: int | None, *, lasting: bool = False) -> None:
        storage = s3.cloud(url, endpoint=proxy.endpoint, single_request_bytes=5 * 2**20)
        proxy.plan(spoil, at=None)
        storage.make_prefix("p")
        proxy.plan(spoil, at=at, lasting=lasting)
        with storage.writer("p/x") as writer:
            for start in range(0, len(data), 2**20):
                writer.write(data[start : start + 2**20])
            writer.publish()

    def sweep_uploads(count: int, *, lasting: bool) -> int:
        num_failed = 0
        for at in range(count):
            url = s3.url()
            try:
                upload(url, at, lasting=lasting)
            except StorageError:
                num_failed += 1
            assert proxy.num_spoilt >= 1
            direct = s3.cloud(url)
            assert direct.names("p") in ([], ["x"])
            if direct.names("p"):
                assert direct.get("p/x", max_bytes=2**30).data == data
        return num_failed

    upload(s3.url(), None)
    count, left = proxy.num_requests, s3.unfinished_uploads()
    assert count >= 4  # begin, parts, complete
    sweep_uploads(count, lasting=False)
    assert s3.unfinished_uploads() - left <= 1  # a begin whose answer was lost is known to nobody; see the docs
    assert sweep_uploads(count, lasting=True) >= count - 1  # what cannot be reached cannot be aborted either


@pytest.mark.soak
def test_a_load_spoilt_in_every_way(s3: ObjectServer, proxy: Proxy) -> None:
    spoil_loads(s3, proxy, Spoil)
