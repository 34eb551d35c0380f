"""Paths and URLs: what opens what, what is refused with which words."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from samerun.checkpoint import Store
from samerun.errors import UsageError
from samerun.storage.cloud.store import Cloud
from samerun.storage.local import Local
from samerun.storage.opening import is_url, open_storage


def test_paths_are_directories(tmp_path: Path) -> None:
    for path in (tmp_path, str(tmp_path), "runs/a:b", "C:/runs"):
        assert isinstance(open_storage(path), Local)
        assert not is_url(path)


def test_memory_is_one_place_by_its_name() -> None:
    open_storage("memory://a").put_if_absent("x", b"1")
    assert open_storage("memory://a").get("x", max_bytes=1).data == b"1"
    assert open_storage("memory://b").names("") == []
    assert Store("memory://c").open_attempt({}) == 1
    assert Store("memory://c").open_attempt({}) == 2


@pytest.mark.parametrize(
    ("url", "environ"),
    [
        ("s3://bucket/run", {"AWS_REGION": "eu-central-1"}),
        ("az://container/run", {"AZURE_STORAGE_ACCOUNT_NAME": "account"}),
    ],
)
def test_urls_are_object_stores_and_opening_asks_nothing(
    monkeypatch: pytest.MonkeyPatch, url: str, environ: dict[str, str]
) -> None:
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    storage = open_storage(f"{url}/")
    assert isinstance(storage, Cloud)
    assert storage.where == url


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("http://host/run", "http:// is not known; there are s3://, gs://, az://, memory://"),
        ("s3:///run", "names no bucket"),
        (Path("s3://bucket/run"), "pass it as a string"),
        ("s3:/bucket/run", "pass it as a string"),
    ],
)
def test_what_is_no_place_is_refused(path: str | Path, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        open_storage(path)


def test_without_obstore_urls_are_refused_and_paths_work() -> None:
    code = """
import sys
sys.modules["obstore"] = None
from samerun.errors import UsageError
from samerun.storage.opening import open_storage
open_storage("runs/a")
try:
    open_storage("s3://bucket/run")
except UsageError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert "pip install 'samerun[cloud]'" in done.stdout
