"""From live state to what this rank will write: described, agreed, planned, and (for background saves) copied away.

Ranks exchange one digest of their descriptions first. Only when digests differ (pipeline stages, irregular cuts) does
one rank of each kind send its description, so the cost grows with what there is to say, not with ranks × tensors.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import xxhash

from samerun.checkpoint.save.agree import all_ranks
from samerun.checkpoint.save.plan import Description, SavePlan, View, plan_save
from samerun.checkpoint.tensors import Held, held
from samerun.core.canonical import canonical_bytes, sha256_hex
from samerun.core.component import Captured
from samerun.errors import UsageError
from samerun.format import names
from samerun.format.codec import encode_plain
from samerun.format.layout import Box
from samerun.format.schema import ComponentEntry, TensorEntry
from samerun.state.fingerprint import tensor_digest

if TYPE_CHECKING:
    from samerun.checkpoint.save.fingerprints import Fingerprints
    from samerun.format.schema import Shared
    from samerun.ranks.group import Group


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """One chunk that this rank writes. `box` is None for a tensor of this rank's own."""

    component: str
    key: str
    dtype: str
    box: Box | None
    is_part: bool
    tensor: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Staged:
    """Everything this rank knows before the first byte is written."""

    plan: SavePlan
    components: dict[str, ComponentEntry]
    pieces: tuple[Piece, ...]
    plain: dict[str, Any]
    digests: dict[str, dict[str, str]]
    unread: Fingerprints | None = None
    """What still gives the digests, where tensors are written from live memory: each is read when it is written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Local:
    """What this rank holds, by `component/key`, and what it reports about its own values by component."""

    shared: dict[str, Held]
    own: dict[str, Held]
    plain: dict[str, Any]
    report: dict[str, Any]


def stage(state: Mapping[str, Captured], fingerprints: Fingerprints, group: Group) -> Staged:
    """Collective; `digests` are still to come from `fingerprints`.

    UsageError on every rank when the state of any rank cannot be stored or ranks contradict.
    """
    found: list[_Local] = []

    def look() -> dict[str, Any]:
        found.append(_look(state, fingerprints))
        return found[0].report

    reports = all_ranks(group, look)
    local = found[0]
    _check_components(reports)
    shared = dict(local.shared)
    sharing: dict[str, tuple[Shared, Shared]] = {}
    for name in state:
        plain, own = _sharing([report["components"][name] for report in reports])
        sharing[name] = plain, own
        if own == "same":
            shared |= {path: item for path, item in local.own.items() if path.split("/", 1)[0] == name}
    plans: list[SavePlan] = []

    views = _views(group, reports, shared)

    def plan() -> None:
        plans.append(plan_save(views, group.size))

    all_ranks(group, plan)
    components = {name: _component(name, sharing[name], plans[0]) for name in state}
    return Staged(
        plan=plans[0],
        components=components,
        pieces=tuple(_pieces(plans[0], shared, local.own, sharing, group.rank)),
        plain=local.plain,
        digests={},
    )


def _look(state: Mapping[str, Captured], fingerprints: Fingerprints) -> _Local:
    shared: dict[str, Held] = {}
    own: dict[str, Held] = {}
    plain: dict[str, Any] = {}
    components: dict[str, Any] = {}
    for name, captured in state.items():
        names.checked_component(name)
        doubled = set(captured.tensors) & set(captured.rank_tensors)
        if doubled:
            raise UsageError(f"{name}: {min(doubled)!r} is both a shared tensor and this rank's own; give it two names")
        for key, tensor in captured.tensors.items():
            shared[f"{name}/{names.checked_tensor_key(name, key)}"] = held(tensor, f"{name}/{key}")
        mine = {
            f"{name}/{names.checked_tensor_key(name, key)}": held(tensor, f"{name}/{key}")
            for key, tensor in captured.rank_tensors.items()
        }
        for path, item in mine.items():
            if "whole" not in item.cut:
                raise UsageError(f"{path}: a rank's own tensor cannot be sharded; capture it in `tensors`")
        own |= mine
        plain[name] = encode_plain(captured.plain, name)
        components[name] = {
            "plain": None if captured.plain is None else sha256_hex(canonical_bytes(plain[name])),
            "own": _own_digest(name, mine, fingerprints) if mine else None,
        }
    view = hashlib.sha256(canonical_bytes(_described(shared))).hexdigest()
    return _Local(shared=shared, own=own, plain=plain, report={"view": view, "components": components})


def _described(shared: Mapping[str, Held]) -> dict[str, Any]:
    return {path: [item.dtype, list(item.shape), item.cut] for path, item in shared.items()}


def _own_digest(component: str, own: Mapping[str, Held], fingerprints: Fingerprints) -> str:
    """Equal on two ranks when they hold the same: their tensors' digests together."""
    digest = xxhash.xxh3_128()
    for path, item in sorted(own.items()):
        of_tensor = tensor_digest(item.parts[0][1])
        fingerprints.note(component, path.split("/", 1)[1], of_tensor)
        digest.update(json.dumps([path, item.dtype, item.shape, of_tensor]).encode())
    return digest.hexdigest()


def _check_components(reports: list[dict[str, Any]]) -> None:
    """Raises on every rank alike: it looks at gathered values only."""
    every = {name for report in reports for name in report["components"]}
    for name in sorted(every):
        without = [rank for rank, report in enumerate(reports) if name not in report["components"]]
        if without:
            raise UsageError(f"{name}: ranks {without} did not capture this component; save the same ones everywhere")


def _sharing(reports: list[dict[str, Any]]) -> tuple[Shared, Shared]:
    return _shared_word([report["plain"] for report in reports]), _shared_word([report["own"] for report in reports])


def _shared_word(digests: list[str | None]) -> Shared:
    if all(digest is None for digest in digests):
        return "none"
    return "same" if len(set(digests)) == 1 else "differ"


def _views(group: Group, reports: list[dict[str, Any]], shared: Mapping[str, Held]) -> list[View]:
    """One description per distinct digest. The branch is the same everywhere: it depends on gathered values only."""
    ranks_of: dict[str, list[int]] = {}
    for rank, report in enumerate(reports):
        ranks_of.setdefault(report["view"], []).append(rank)
    mine: Description = _described(shared)
    if len(ranks_of) == 1:
        return [View(ranks=tuple(range(group.size)), description=mine)]
    speaks = ranks_of[reports[group.rank]["view"]][0] == group.rank
    said = group.gather(mine if speaks else None)
    return [View(ranks=tuple(ranks), description=said[ranks[0]]) for ranks in ranks_of.values()]


def _component(name: str, sharing: tuple[Shared, Shared], plan: SavePlan) -> ComponentEntry:
    tensors: dict[str, TensorEntry] = {}
    for path, entry in plan.tensors.items():
        component, key = path.split("/", 1)
        if component == name:
            tensors[key] = entry
    return ComponentEntry(plain=sharing[0], rank_tensors=sharing[1], tensors=tensors)


def _pieces(
    plan: SavePlan,
    shared: Mapping[str, Held],
    own: Mapping[str, Held],
    sharing: Mapping[str, tuple[Shared, Shared]],
    rank: int,
) -> list[Piece]:
    pieces = []
    for path, item in shared.items():
        component, key = path.split("/", 1)
        mine = dict(item.parts)
        is_part = len(plan.layouts[plan.tensors[path].layout].ranks) > 1
        pieces += [
            Piece(component=component, key=key, dtype=item.dtype, box=box, is_part=is_part, tensor=_part(mine, box))
            for box in plan.boxes_of(path, rank)
        ]
    for path, item in own.items():
        component, key = path.split("/", 1)
        if sharing[component][1] == "differ":
            tensor = item.parts[0][1]
            pieces.append(Piece(component=component, key=key, dtype=item.dtype, box=None, is_part=False, tensor=tensor))
    return pieces


def _part(mine: Mapping[Box, torch.Tensor], box: Box) -> torch.Tensor:
    """The piece that the plan gave this rank; an empty tensor may be written by a rank that holds no piece of it."""
    if box.volume == 0 and box not in mine:
        return torch.empty(box.lengths, dtype=torch.uint8)
    return mine[box]
