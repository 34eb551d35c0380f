"""From a path or URL to the storage behind it. Object stores are imported only when a URL asks for one.

runs/policy-sft            a local or mounted directory
s3://bucket/prefix         Amazon S3 and what speaks like it
gs://bucket/prefix         Google Cloud Storage
az://container/prefix      Azure Blob Storage
memory://name              this process's memory: for tests, gone with the process
"""

from __future__ import annotations

import re
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Final

from samerun.errors import UsageError
from samerun.storage.local import Local
from samerun.storage.memory import Memory

if TYPE_CHECKING:
    from samerun.storage.api import Storage

CLOUD_SCHEMES: Final = ("s3", "gs", "az")
MEMORY_SCHEME: Final = "memory"
_URL: Final = re.compile(r"([a-z][a-z0-9+.-]*)://(.*)\Z", re.DOTALL)
_CUT_URL: Final = re.compile(r"(s3|gs|az|memory):/[^/]")
_memories: dict[str, Memory] = {}
"""What `memory://` URLs name, so that a store opened again in this process finds what the first one wrote."""


def is_url(path: str | Path) -> bool:
    return isinstance(path, str) and _URL.match(path) is not None


def open_storage(path: str | Path) -> Storage:
    """The storage at `path`. Nothing is asked of it and nothing is written yet.

    Raises UsageError for an unknown scheme, a URL without a bucket, or a URL that was made a `Path`.
    """
    if _CUT_URL.match(str(path)):
        raise UsageError(f"{path}: pathlib cuts the slashes of a URL; pass it as a string")
    found = _URL.match(str(path))
    if found is None:
        return Local(path)
    scheme, rest = found.groups()
    if scheme == MEMORY_SCHEME:
        return _memories.setdefault(rest, Memory())
    if scheme not in CLOUD_SCHEMES:
        known = ", ".join(f"{name}://" for name in (*CLOUD_SCHEMES, MEMORY_SCHEME))
        raise UsageError(f"{path}: storage of kind {scheme}:// is not known; there are {known} and plain paths")
    if not rest.split("/", 1)[0]:
        raise UsageError(f"{path}: names no bucket; write {scheme}://BUCKET/PREFIX")
    return _open_cloud(str(path))


REPEAT_SECONDS: Final = 60.0
"""How long obstore repeats one request to a store that is down or throttles (5xx, 429, broken connections)."""


def _open_cloud(url: str) -> Storage:
    try:
        from obstore.store import from_url

        from samerun.storage.cloud.requests import Requests
        from samerun.storage.cloud.store import Cloud
    except ImportError as error:
        raise UsageError(f"{url}: object stores need obstore; pip install 'samerun[cloud]'") from error
    try:
        store = from_url(url, retry_config={"retry_timeout": timedelta(seconds=REPEAT_SECONDS)})
    except Exception as error:  # every backend has errors of its own for what its environment lacks
        reason = str(error).partition("\n")[0]
        raise UsageError(f"{url}: {reason}; credentials and endpoints come from the vendor's own variables") from error
    return Cloud(Requests(store), url=url)
