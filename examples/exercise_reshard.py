"""Four slices become eight: every destination from the pieces it needs, with gaps and overlaps rejected.

python examples/exercise_reshard.py

Coordinates first: the four boxes must cover the tensor, every element once; that is proven before a number is moved.
Then each of the eight reads only where its box meets a source. A checkpoint of `ckpt.v1` is loaded by this rule.
"""

from __future__ import annotations

from collections.abc import Sequence

from samerun.errors import DamagedError
from samerun.format.layout import Box, grid_box, prove_partition

LENGTH = 26
"""Not divisible by 4 or 8: the last slices are shorter."""

Slices = Sequence[tuple[Box, list[int]]]


def cut(values: Sequence[int], pieces: int) -> list[tuple[Box, list[int]]]:
    boxes = [grid_box((len(values),), (pieces,), number) for number in range(pieces)]
    return [(box, list(values[box.offsets[0] : box.offsets[0] + box.lengths[0]])) for box in boxes]


def pieces_for(wanted: Box, sources: Slices) -> list[tuple[int, Box]]:
    """(number of the source, the part of it) that `wanted` is made of."""
    met = [(number, wanted.meet(box)) for number, (box, _) in enumerate(sources)]
    return [(number, part) for number, part in met if part is not None]


def reshard(sources: Slices, pieces: int, *, length: int) -> list[tuple[Box, list[int]]]:
    """The same tensor in `pieces` slices. DamagedError when the sources leave a gap, overlap or lie outside."""
    prove_partition((length,), [box for box, _ in sources], where="the four slices")
    found = []
    for number in range(pieces):
        wanted = grid_box((length,), (pieces,), number)
        values = [-1] * wanted.lengths[0]
        for source, part in pieces_for(wanted, sources):
            box, held = sources[source]
            (start,), (size,) = part.within(box).offsets, part.lengths
            (at,) = part.within(wanted).offsets
            values[at : at + size] = held[start : start + size]
        found.append((wanted, values))
    return found


def broken(sources: Slices) -> dict[str, Slices]:
    """Slices that a loader must not accept."""
    box, held = sources[2]
    overlapping = (Box((box.offsets[0] - 1,), (box.lengths[0] + 1,)), [0, *held])
    shifted = (Box((box.offsets[0] - 1,), box.lengths), held)
    return {
        "a gap": [*sources[:2], sources[3]],
        "an overlap": [*sources[:2], overlapping, sources[3]],
        "a gap and an overlap of the same size": [*sources[:2], shifted, sources[3]],
        "a slice twice": [*sources[:3], sources[2], sources[3]],
        "a slice outside": [*sources[:3], (Box((LENGTH,), (5,)), [0] * 5)],
    }


def main() -> None:
    sources = cut(range(LENGTH), 4)
    for number, (box, values) in enumerate(reshard(sources, 8, length=LENGTH)):
        origin = ", ".join(f"{part} of slice {source}" for source, part in pieces_for(box, sources)) or "nothing"
        print(f"destination {number} {box!s:8s} {values} from {origin}")
    for name, slices in broken(sources).items():
        try:
            reshard(slices, 8, length=LENGTH)
        except DamagedError as error:
            print(f"{name}: {error}")


if __name__ == "__main__":
    main()
