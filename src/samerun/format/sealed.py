"""Documents that prove themselves: canonical JSON with a schema word and the digest of everything else in it.

`self_sha256` is the SHA-256 of the canonical bytes of the document without that field. Reading checks, in this order:
canonical form, schema word, digest, then the types; so an unknown schema is named even when nothing else is understood.
"""

from __future__ import annotations

import hashlib
from typing import Any, Final, TypeVar

import msgspec

from samerun.core.canonical import canonical_bytes, decode_canonical
from samerun.errors import DamagedError, SchemaError

SELF: Final = "self_sha256"
T = TypeVar("T", bound=msgspec.Struct)


def to_document(value: msgspec.Struct) -> dict[str, Any]:
    """A typed record as a JSON tree."""
    tree = msgspec.to_builtins(value)
    assert isinstance(tree, dict)
    return tree


def seal(tree: dict[str, Any]) -> bytes:
    """The bytes of the document `tree` with its own digest in it."""
    bare = {key: value for key, value in tree.items() if key != SELF}
    return canonical_bytes(bare | {SELF: hashlib.sha256(canonical_bytes(bare)).hexdigest()})


def unseal(data: bytes, *, schema: str, where: str) -> dict[str, Any]:
    """The document without its seal; SchemaError for a foreign one, DamagedError for one that was changed."""
    tree = decode_document(data, schema=schema, where=where)
    claimed = tree.pop(SELF, None)
    found = hashlib.sha256(canonical_bytes(tree)).hexdigest()
    if claimed != found:
        raise DamagedError(f"{where}: its digest is {found}, it claims {claimed}; the file was edited or damaged")
    return tree


def decode_document(data: bytes, *, schema: str, where: str) -> dict[str, Any]:
    """A canonical JSON object that says it is `schema`; SchemaError with what it is instead."""
    if not data:
        raise DamagedError(f"{where}: the file is empty")
    tree = decode_canonical(data, where=where)
    found = tree.get("schema") if isinstance(tree, dict) else None
    if not isinstance(tree, dict) or found != schema:
        said = f"the unknown schema {str(found)[:80]!r}" if found is not None else "no schema"
        raise SchemaError(f"{where}: has {said}, expected {schema!r}; was it written by a newer samerun, or by others?")
    return tree


def typed(tree: dict[str, Any], kind: type[T], *, where: str) -> T:
    """The tree as the record `kind`: every field, no other field, no coercion. SchemaError names the bad one."""
    try:
        return msgspec.convert(tree, kind, strict=True)
    except (msgspec.ValidationError, ValueError, OverflowError) as error:
        text = str(error)  # quotes names out of the file, however long they are
        raise SchemaError(f"{where}: {text if len(text) <= 400 else f'{text[:300]} … {text[-99:]}'}") from error
