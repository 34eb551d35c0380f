"""A rank's index, verified against the manifest that names it. No torch."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

from samerun.checkpoint.catalog import num_elements
from samerun.errors import DamagedError, NotFoundError
from samerun.format import names, schema
from samerun.format.dtypes import ITEM_BYTES
from samerun.format.schema import Index, RankTensor
from samerun.format.sealed import decode_document, typed

if TYPE_CHECKING:
    from samerun.format.schema import Manifest
    from samerun.storage.api import Storage


def read_index(storage: Storage, manifest: Manifest, rank: int) -> Index:
    """The index of one saved rank; DamagedError when it is not the one that was published."""
    file = next(file for file in manifest.files if file.name == names.index_file(rank))
    key = f"{names.checkpoint_prefix(manifest.name)}/{file.name}"
    try:
        data = storage.get(key, max_bytes=schema.MAX_DOCUMENT_BYTES).data
    except NotFoundError as error:
        raise DamagedError(f"{key}: missing; the manifest names it with {file.num_bytes} bytes") from error
    if len(data) != file.num_bytes:
        raise DamagedError(f"{key}: {len(data)} bytes, the manifest says {file.num_bytes}; the file was cut or changed")
    found = hashlib.sha256(data).hexdigest()
    if found != file.sha256:
        raise DamagedError(f"{key}: SHA-256 is {found}, the manifest says {file.sha256}; the file is damaged")
    index = typed(decode_document(data, schema=schema.INDEX_SCHEMA, where=key), Index, where=key)
    if index.rank != rank or index.checkpoint != manifest.name:
        raise DamagedError(f"{key}: is the index of rank {index.rank} of {index.checkpoint}")
    _check_known(manifest, index, key)
    for component, tensors in index.rank_tensors.items():
        for name, tensor in tensors.items():
            _check_rank_tensor(tensor, index, f"{key}: {component}/{name}")
    return index


def _check_known(manifest: Manifest, index: Index, key: str) -> None:
    """Nothing in an index may be unknown to the manifest: what nobody asks for would go unnoticed."""
    named = {*index.plain, *index.chunks, *index.rank_tensors, *index.digests}
    for component in sorted(named - set(manifest.components)):
        raise DamagedError(f"{key}: holds a component {component!r} that the manifest does not name")
    for component, tensors in index.chunks.items():
        for name in sorted(tensors.keys() - manifest.components[component].tensors.keys()):
            raise DamagedError(f"{key}: holds a tensor {component}/{name[:80]} that the manifest does not name")


def _check_rank_tensor(tensor: RankTensor, index: Index, path: str) -> None:
    if tensor.dtype not in ITEM_BYTES:
        raise DamagedError(f"{path}: unknown dtype {tensor.dtype[:40]!r}")
    end = tensor.start + num_elements(tensor.shape) * ITEM_BYTES[tensor.dtype]
    if index.file is None or end > index.file.num_bytes:
        raise DamagedError(f"{path}: its bytes end at {end}, beyond the file")
