"""Packing of documents into sequences of one length, by reference: concat and chunk.

The documents of an epoch, in the order of that epoch's own permutation, are one long line of tokens; sequence j is
tokens [j·S, j·S + S + 1) of it: S inputs and, shifted by one, S targets. It is worked out from the lengths alone, so a
position is a number, nothing of the text is ever in a state, and any sequence is found without reading those before it.
The tail of an epoch that does not fill a sequence is not seen in that epoch: (T − 1) mod S tokens.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from samerun.data.order import Int64Array, Order
from samerun.errors import UsageError

_CACHED_EPOCHS: Final = 2
"""A window may straddle an epoch's end; both are needed then."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Tokens [start, stop) of one document."""

    document: int
    start: int
    stop: int


class PackedDocuments:
    """A map-style dataset of packed sequences, for `Data`. Item: {"tokens": int64[S + 1], "document": int64[S + 1]}.

    `documents[d]` gives document d's tokens (any sequence of integers, read only when a sequence needs it), and
    `lengths[d]` says how many there are. "document" numbers the pieces of a sequence 0, 1, 2, …: mask attention and the
    loss of the first token after a change with it. Memory: 16 bytes a document and epoch; the first sequence of an
    epoch costs one pass over the lengths.

    Guarantee: with `Data`, each token but the tail is a target exactly once per epoch, on any ranks, workers and after
    any resume; documents keep their order within an epoch and get another one in the next. Raises UsageError when a
    document is not as long as it was said to be.
    """

    unit: Final = "sequence"

    def __init__(self, documents: Any, lengths: Sequence[int], *, sequence_length: int, seed: int = 0) -> None:
        counts = np.asarray(lengths)
        if counts.size and counts.dtype.kind not in "iu":
            raise UsageError(f"lengths are {counts.dtype} numbers; give whole ones, how many tokens each document has")
        counts = counts.astype(np.int64)
        if counts.ndim != 1 or len(counts) != len(documents):
            raise UsageError(
                f"{len(documents)} documents and {counts.shape} lengths; give one length for each document"
            )
        if sequence_length < 1 or (counts < 0).any():
            raise UsageError(f"sequence_length={sequence_length} must be at least 1, and no length negative")
        self._documents = documents
        self._lengths = counts
        self._order = Order(num_samples=max(1, len(counts)), seed=seed)
        self._epochs: OrderedDict[int, tuple[Int64Array, Int64Array]] = OrderedDict()
        self.sequence_length = sequence_length
        self.tokens_per_epoch = int(counts.sum())
        self._size = max(0, self.tokens_per_epoch - 1) // sequence_length
        if self._size == 0:
            raise UsageError(
                f"{self.tokens_per_epoch} tokens do not fill one sequence of {sequence_length} and its target; use a "
                "shorter sequence_length or more documents"
            )
        digest = hashlib.blake2b(counts.tobytes(), digest_size=8).hexdigest()
        self.fingerprint = f"packed|{sequence_length}|{seed}|{digest}"

    def __len__(self) -> int:
        return self._size

    def pieces(self, epoch: int, sequence: int) -> tuple[Piece, ...]:
        """Which tokens of which documents make up a sequence, in order."""
        if not 0 <= sequence < self._size:
            raise IndexError(f"sequence {sequence} of {self._size}")
        order, ends = self._line(epoch)
        begin = sequence * self.sequence_length
        end = begin + self.sequence_length + 1
        first = int(np.searchsorted(ends, begin, side="right"))
        result = []
        while begin < end:
            document = int(order[first])
            offset = begin - int(ends[first] - self._lengths[document])
            taken = min(end, int(ends[first])) - begin
            if taken:
                result.append(Piece(document=document, start=offset, stop=offset + taken))
            begin += taken
            first += 1
        return tuple(result)

    def sample_of(self, epoch: int, sequence: int) -> dict[str, Any]:
        """The sequence as tensors."""
        import torch

        tokens = torch.empty(self.sequence_length + 1, dtype=torch.int64)
        numbers = torch.empty_like(tokens)
        filled = 0
        for number, piece in enumerate(self.pieces(epoch, sequence)):
            size = piece.stop - piece.start
            tokens[filled : filled + size] = torch.as_tensor(self._part(piece), dtype=torch.int64)
            numbers[filled : filled + size] = number
            filled += size
        return {"tokens": tokens, "document": numbers}

    def __getitem__(self, sequence: int) -> dict[str, Any]:
        return self.sample_of(0, sequence)

    def _part(self, piece: Piece) -> Any:
        document = self._documents[piece.document]
        expected = int(self._lengths[piece.document])
        if len(document) != expected:
            raise UsageError(
                f"document {piece.document} has {len(document)} tokens, {expected} were said; positions would shift. "
                "Give the lengths of the documents as they are now"
            )
        part = document[piece.start : piece.stop]
        return list(part) if isinstance(part, (bytes, bytearray, tuple)) else part

    def _line(self, epoch: int) -> tuple[Int64Array, Int64Array]:
        """The epoch's order of documents, and where each ends on the line of tokens."""
        known = self._epochs.get(epoch)
        if known is None:
            count = len(self._lengths)
            order = self._order.lookup(np.full(count, epoch, np.int64), np.arange(count, dtype=np.int64))
            known = (order, np.cumsum(self._lengths[order]))
            self._epochs[epoch] = known
            if len(self._epochs) > _CACHED_EPOCHS:
                self._epochs.popitem(last=False)
        return known
