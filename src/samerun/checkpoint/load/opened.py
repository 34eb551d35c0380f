"""Opening a checkpoint: manifest, this rank's index, then tensors by slices, each byte verified before it is used.

The chain: the manifest proves itself and is the one the catalog saw → it holds the SHA-256 of every index → an index
holds the digests of its shard's blocks → a block is verified before a byte of it is copied. Coverage is proven from
the layout before anything is read, so a target element is filled exactly once or the read is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from samerun.checkpoint.catalog import check_sizes, read_manifest
from samerun.checkpoint.load.indexes import read_index
from samerun.core.progress import Progress
from samerun.errors import DamagedError, MismatchError
from samerun.format import names
from samerun.format.blocks import BlockReader, ReadAccount
from samerun.format.codec import decode_plain

if TYPE_CHECKING:
    from samerun.checkpoint.catalog import Entry
    from samerun.checkpoint.load.source import CheckpointSource
    from samerun.core.component import Plain
    from samerun.format.schema import Index, Manifest
    from samerun.storage.api import Storage


class Checkpoint:
    """One checkpoint, opened by one rank. Close it (or use it as a context) when everything is read.

    Nothing here is collective: ranks open and read by themselves and compare outcomes afterwards.
    """

    def __init__(self, storage: Storage, entry: Entry, *, rank: int, size: int) -> None:
        manifest, sha256 = read_manifest(storage, entry.name)
        if sha256 != entry.manifest_sha256:
            raise DamagedError(f"{entry.name}: the manifest changed since it was listed")
        check_sizes(storage, manifest)
        self._storage = storage
        self._rank = rank
        self._files = {file.name: file for file in manifest.files}
        self._indexes: dict[int, Index] = {}
        self._readers: dict[int, BlockReader] = {}
        self._sources: dict[str, CheckpointSource] = {}
        self.manifest: Manifest = manifest
        self.entry = entry
        self.same_size = size == manifest.num_ranks
        self.reads = ReadAccount()
        self.when_consumed: Callable[[str], None] = lambda _: None
        """Told the name once everything was read: those bytes are then known to be right."""
        self.index(self.own_rank)

    @property
    def own_rank(self) -> int:
        """The rank whose index speaks for this process: its own, or 0 when the world has another size."""
        return self._rank if self.same_size else 0

    @property
    def facts(self) -> dict[str, Any]:
        return self.manifest.facts

    @property
    def progress(self) -> Progress:
        return self.entry.progress

    @property
    def world_size(self) -> int:
        """How many ranks wrote it."""
        return self.manifest.num_ranks

    @property
    def components(self) -> tuple[str, ...]:
        return tuple(self.manifest.components)

    @property
    def digests(self) -> dict[str, dict[str, str]]:
        """Component → key → fingerprint, as this rank held it when it was saved (rank 0, in another world size)."""
        return {name: dict(found) for name, found in self.index(self.own_rank).digests.items()}

    def source(self, component: str) -> CheckpointSource:
        """One component to be read; always the same object, so that what was read is known at the end."""
        from samerun.checkpoint.load.source import CheckpointSource  # tensors are touched from here on: torch is loaded

        if component not in self.manifest.components:
            raise MismatchError(
                f"{self.entry.name}: holds no component {component!r}, only {', '.join(self.components)}; it was saved "
                f"by another set-up. Waive the component by name, or resume with the one that saved it"
            )
        if component not in self._sources:
            self._sources[component] = CheckpointSource(self, component)
        return self._sources[component]

    def unconsumed(self) -> list[str]:
        """`component` (its plain state) and `component/key` that this rank could have read and did not."""
        left: list[str] = []
        for component in self.components:
            left += self.source(component).unconsumed()
        if not left:
            self.when_consumed(self.entry.name)
        return left

    def index(self, rank: int) -> Index:
        """The verified index of one saved rank."""
        if rank not in self._indexes:
            self._indexes[rank] = read_index(self._storage, self.manifest, rank)
        return self._indexes[rank]

    def plain(self, component: str, rank: int) -> Plain:
        where = f"{self.entry.name}/{names.index_file(rank)}: {component}"
        return decode_plain(self.index(rank).plain.get(component), where)

    def blocks(self, rank: int) -> BlockReader:
        """The verifying reader of one saved rank's shard, opened once."""
        if rank not in self._readers:
            file = self.index(rank).file
            where = f"{names.checkpoint_prefix(self.entry.name)}/{names.data_file(rank)}"
            entry = self._files.get(names.data_file(rank))
            if file is None or entry is None or (file.name, file.num_bytes) != (entry.name, entry.num_bytes):
                raise DamagedError(f"{where}: the index and the manifest do not describe the same file")
            self._readers[rank] = BlockReader(self._storage.reader(where), file, where=where, account=self.reads)
        return self._readers[rank]

    def close(self) -> None:
        for reader in self._readers.values():
            reader.close()
        self._readers.clear()

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
