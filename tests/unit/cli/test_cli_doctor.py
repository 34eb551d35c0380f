"""`samerun doctor`: good storage is fit, storage that breaks a guarantee is unfit for that reason, nothing is left."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import obstore
import pytest
from obstore.store import MemoryStore

from object_servers import FAST, ObjectServer
from samerun.cli import main as cli
from samerun.core.environ import launcher
from samerun.core.machine import Fact, machine_facts
from samerun.storage.api import Buffer
from samerun.storage.cloud.requests import Requests
from samerun.storage.cloud.store import Cloud
from samerun.storage.memory import Memory
from samerun.storage.posix import Files
from samerun.storage.probe import Guarantee, probe_files, probe_storage


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, Any, str]:
    argv, sys.argv = sys.argv, ["samerun", "doctor", *arguments]
    try:
        cli.main()
        code = 0
    except SystemExit as stop:
        code = int(stop.code or 0)
    finally:
        sys.argv = argv
    out = capsys.readouterr()
    return code, json.loads(out.out) if "--json" in arguments else out.out, out.err


def broken(found: list[Guarantee]) -> list[str]:
    return [item.name for item in found if not item.held]


def test_a_directory_is_fit_and_left_as_it_was(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, told, _ = run(capsys, str(tmp_path / "not" / "yet"), "--json")
    assert (code, told["verdict"], told["missing"]) == (0, "fit", [])
    assert told["schema"] == "samerun.doctor.v1"
    assert {item["name"] for item in told["storage"]} >= {"exclusive create", "rename", "fsync of a directory"}
    assert {fact["name"] for fact in told["machine"]} >= {"torch", "free space", "shared memory", "clock", "ranks"}
    assert list(tmp_path.iterdir()) == []


def test_the_table_says_what_is_missing(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    code, told, _ = run(capsys, "memory://doctor")
    assert code == 0
    assert "exclusive create" in told
    code, told, _ = run(capsys, str(tmp_path))
    assert "unfit" not in told


@pytest.mark.parametrize("name", ["s3", "azure"])
def test_a_real_store_is_fit_and_left_empty(
    request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    server: ObjectServer = request.getfixturevalue(name)
    for variable, value in server.environ.items():
        monkeypatch.setenv(variable, value)
    url = server.url()
    code, told, _ = run(capsys, url, "--json")
    assert (code, told["missing"]) == (0, [])
    assert all(item["held"] for item in told["storage"])
    assert obstore.list(server.store(url)).collect() == []


def test_a_url_that_makes_no_sense_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, told = run(capsys, "ftp://host/x")
    assert code == 2
    assert "not known" in told


class Overwriting(Memory):
    def put_if_absent(self, key: str, data: bytes) -> None:
        self.preload(key, data)


class Careless(Memory):
    def put_if_unchanged(self, key: str, data: bytes, version: str | None, *, durable: bool = True) -> None:
        self.preload(key, data)


class Sharing(Memory):
    def make_prefix(self, prefix: str) -> None:
        self.prefixes.add(prefix)


class Late(Memory):
    """New objects show up in listings only later, as eventually consistent stores had it."""

    def names(self, prefix: str) -> list[str]:
        return [] if prefix == "listed" else super().names(prefix)


class Hoarding(Memory):
    def discard(self, prefix: str, first: str = "") -> None:
        return None


class Leaking(Memory):
    """What is written shows at once, published or not."""

    def writer(self, key: str) -> Any:
        writer = super().writer(key)
        store, write = self, writer.write

        class Open(type(writer)):  # type: ignore[misc]
            def write(self, data: Buffer) -> None:
                write(data)
                store.preload(key, bytes(data))

            def publish(self) -> None:
                return None

        return Open(self, key)


@pytest.mark.parametrize(
    ("storage", "names"),
    [
        (Overwriting(), {"exclusive create", "one winner of many"}),
        (Careless(), {"conditional replace"}),
        (Sharing(), {"fresh prefix"}),
        (Late(), {"listing after write"}),
        (Hoarding(), {"removal"}),
        (Leaking(), {"whole or absent"}),
        (Memory(), set()),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_storage_that_breaks_one_guarantee_is_found_out(storage: Memory, names: set[str]) -> None:
    assert set(broken(probe_storage(storage))) == names


class Forgetful(Requests):
    def create(self, key: str, data: bytes, mark: str) -> None:
        obstore.put(self._store, key, data, mode="overwrite", attributes={"samerunwriter": mark})


def test_an_object_store_that_accepts_a_second_create_is_unfit(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = Cloud(Forgetful(MemoryStore()), url="s3://old/run", patience=FAST)
    monkeypatch.setattr("samerun.storage.probe.open_storage", lambda url: storage)
    code, told, _ = run(capsys, "s3://old/run")
    assert code == 3
    assert "MISSING" in told
    assert "accepted a second create" in told
    assert "unfit: samerun cannot keep its promises without exclusive create" in told


class NoLinks(Files):
    def link(self, source: str, target: str) -> None:
        raise PermissionError(1, "Operation not permitted", target)


class NoRename(Files):
    def rename(self, source: str, target: str) -> None:
        return None


def test_what_a_file_system_cannot_do_is_named(tmp_path: Path) -> None:
    for number, (files, names) in enumerate([(Files(), []), (NoLinks(), ["hard links"]), (NoRename(), ["rename"])]):
        folder = tmp_path / str(number)
        folder.mkdir()
        found = probe_files(files, str(folder))
        assert broken(found) == names
        assert [item.needed for item in found if item.name == "hard links"] == [False]


def test_facts_of_the_launcher(tmp_path: Path) -> None:
    def ranks(environ: dict[str, str]) -> Fact:
        return next(fact for fact in machine_facts(launcher(environ), folder=tmp_path) if fact.name == "ranks")

    assert ranks({}).detail == "started by hand: one process"
    assert ranks({"RANK": "3", "WORLD_SIZE": "7"}).detail == "rank 3 of 7"
