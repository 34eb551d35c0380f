"""Real object-store servers on 127.0.0.1, started by whoever asks first and stopped with the tests: an S3 API (moto)
and Azure Blob (Azurite). `make services` installs them; where they are not installed, tests skip and say so."""

from __future__ import annotations

import base64
import ctypes
import email.utils
import hashlib
import hmac
import os
import re
import secrets
import signal
import subprocess
import threading
import urllib.request
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from obstore.store import from_url

from samerun.storage.cloud.requests import Requests
from samerun.storage.cloud.store import Cloud, Patience

SERVICES = Path(__file__).parents[1] / ".services"
MOTO = SERVICES / "venv" / "bin" / "moto_server"
AZURITE = SERVICES / "node_modules" / ".bin" / "azurite-blob"
BUCKET = "training"
AZURITE_ACCOUNT = "devstoreaccount1"
AZURITE_KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
"""Azurite's account, the same everywhere and published by Microsoft; it opens nothing else."""

QUICK = {
    "max_retries": 2,
    "retry_timeout": timedelta(seconds=2),
    "backoff": {
        "init_backoff": timedelta(milliseconds=1),
        "max_backoff": timedelta(milliseconds=2),
        "base": 2,
    },
}
"""obstore's own repetitions, fast enough for tests: two, milliseconds apart."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectServer:
    """A running server. `environ` is what a user would set to reach it."""

    scheme: str
    endpoint: str
    environ: dict[str, str]

    def url(self) -> str:
        """A place of its own in the bucket."""
        return f"{self.scheme}://{BUCKET}/runs/{secrets.token_hex(6)}"

    def cloud(self, url: str, *, endpoint: str | None = None, timeout: str = "10s", **options: Any) -> Cloud:
        """The store at `url` with quick retries; with `endpoint`, through a proxy."""
        return Cloud(Requests(self.store(url, endpoint=endpoint, timeout=timeout)), url=url, patience=FAST, **options)

    def unfinished_uploads(self) -> int:
        """How many multipart uploads S3 holds parts of; obstore has no word for this request."""
        with urllib.request.urlopen(f"{self.endpoint}/{BUCKET}?uploads") as answer:
            return int(answer.read().count(b"<UploadId>"))

    def store(self, url: str, *, endpoint: str | None = None, timeout: str = "10s") -> Any:
        client: Any = {"timeout": timeout, "allow_http": True}
        with pytest.MonkeyPatch.context() as patch:
            for name, value in self.environ.items():
                patch.setenv(name, value)
            if endpoint is not None:
                patch.setenv("AZURITE_BLOB_STORAGE_URL" if self.scheme == "az" else "AWS_ENDPOINT_URL", endpoint)
            return from_url(url, client_options=client, retry_config=QUICK)


FAST = Patience(max_tries=3, first_wait_seconds=0.001)


_LIBC = ctypes.CDLL(None, use_errno=True)
_PR_SET_PDEATHSIG = 1


def _die_with_the_tests() -> None:
    """The kernel ends the server when the tests are killed, which no `finally` sees (prctl(2), Linux)."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


@contextmanager
def _running(command: list[str], says: str) -> Iterator[str]:
    """The endpoint that the server prints once it listens. Always stopped."""
    environ = {**os.environ, "PYTHONUNBUFFERED": "1", "NO_COLOR": "1"}
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environ,
        start_new_session=True,
        preexec_fn=_die_with_the_tests,
    )
    pipe = process.stdout
    assert pipe is not None
    drain = threading.Thread(target=lambda: deque(pipe, maxlen=0), daemon=True)
    try:
        seen = []
        for line in pipe:
            seen.append(line)
            if found := re.search(says, line):
                drain.start()  # a server whose log nobody reads stops when the pipe is full
                yield found.group(1)
                return
        raise RuntimeError(f"{command[0]} ended before it listened: {''.join(seen)}")
    finally:
        process.kill()
        process.wait()
        if drain.ident is not None:
            drain.join()
        pipe.close()


@pytest.fixture(scope="session")
def s3() -> Iterator[ObjectServer]:
    """An S3 API with an empty bucket."""
    if not MOTO.exists():
        pytest.skip("no S3 server: `make services` installs moto")
    with _running([str(MOTO), "--host", "127.0.0.1", "--port", "0"], r"(http://127\.0\.0\.1:\d+)") as endpoint:
        urllib.request.urlopen(urllib.request.Request(f"{endpoint}/{BUCKET}", method="PUT")).close()
        environ = {
            "AWS_ENDPOINT_URL": endpoint,
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "test",
            "AWS_REGION": "us-east-1",
            "AWS_ALLOW_HTTP": "true",
        }
        yield ObjectServer(scheme="s3", endpoint=endpoint, environ=environ)


@pytest.fixture(scope="session")
def azure() -> Iterator[ObjectServer]:
    """Azure Blob with an empty container."""
    if not AZURITE.exists():
        pytest.skip("no Azure server: `make services` installs Azurite where npm is")
    options = [
        "--blobHost",
        "127.0.0.1",
        "--blobPort",
        "0",
        "--inMemoryPersistence",
        "--skipApiVersionCheck",
        "--loose",
    ]
    command = [str(AZURITE), *options, "--disableTelemetry", "--silent"]
    with _running(command, r"listens on (http://127\.0\.0\.1:\d+)") as endpoint:
        _make_container(endpoint)
        environ = {
            "AZURE_STORAGE_USE_EMULATOR": "true",
            "AZURITE_BLOB_STORAGE_URL": endpoint,
            "AZURE_ALLOW_HTTP": "true",
        }
        yield ObjectServer(scheme="az", endpoint=endpoint, environ=environ)


def _make_container(endpoint: str) -> None:
    """Shared Key authorization of Azure Storage, for the one request that obstore has no word for."""
    date, version = email.utils.formatdate(usegmt=True), "2021-08-06"
    resource = f"/{AZURITE_ACCOUNT}/{AZURITE_ACCOUNT}/{BUCKET}\nrestype:container"
    signed = "PUT" + "\n" * 12 + f"x-ms-date:{date}\nx-ms-version:{version}\n{resource}"
    digest = hmac.new(base64.b64decode(AZURITE_KEY), signed.encode(), hashlib.sha256).digest()
    headers = {
        "x-ms-date": date,
        "x-ms-version": version,
        "Authorization": f"SharedKey {AZURITE_ACCOUNT}:{base64.b64encode(digest).decode()}",
        "Content-Type": "",
        "Content-Length": "0",
    }
    url = f"{endpoint}/{AZURITE_ACCOUNT}/{BUCKET}?restype=container"
    urllib.request.urlopen(urllib.request.Request(url, method="PUT", headers=headers)).close()
