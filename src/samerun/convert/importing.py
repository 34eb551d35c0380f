"""Imports: a foreign checkpoint becomes one of ckpt.v1, from which new runs can begin. It is never a run to resume."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch

from samerun.checkpoint import Store
from samerun.convert.sources import read
from samerun.core.component import Captured
from samerun.core.progress import Progress
from samerun.errors import AlreadyExistsError, UsageError
from samerun.state.tree import split_tree

if TYPE_CHECKING:
    from samerun.checkpoint import Entry

WEIGHTS_KEYS: Final = ("model", "state_dict", "model_state_dict", "module", "weights")
"""Where other programs keep the weights in a larger state, in this order."""
REST: Final = "imported"


def import_checkpoint(
    source: str | Path, run: str | Path, *, weights: str | None = None, buffers: Sequence[str] = ()
) -> Entry:
    """Reads `source` (see `read`) and publishes it as the one checkpoint at `run`, for `samerun.warm_start`.

    `weights`: the key under which the state keeps the model's tensors (default: the state itself when it holds only
    tensors, else the first usual one). `buffers`: patterns (`*.running_mean`) of tensors that are buffers of the model;
    files do not tell them from parameters. Whatever else was in the state is kept as the component `imported`.
    Raises AlreadyExistsError when there is something at `run`.
    """
    foreign = read(source)
    found, rest = _weights_and_rest(foreign.state, weights, str(source))
    tensors = {_bare(key, found): tensor for key, tensor in found.items()}
    is_buffer = {key: any(fnmatchcase(key, pattern) for pattern in buffers) for key in tensors}
    store = Store(run)
    if Path(run).is_file() or (Path(run).is_dir() and any(Path(run).iterdir())):
        raise AlreadyExistsError(17, "there is something already; import to a new path", str(run))
    state = {
        "weights": Captured(plain={"aliases": {}}, tensors={k: t for k, t in tensors.items() if not is_buffer[k]}),
        "buffers": Captured(rank_tensors={k: t for k, t in tensors.items() if is_buffer[k]}),
    }
    if rest:
        plain, others = split_tree(rest, path="")
        state[REST] = Captured(plain=plain, tensors=others)
    store.write_run({"id": uuid.uuid4().hex, "identity": {}, "kind": "import"})
    facts = {"import": {"kind": foreign.kind, "source": str(Path(source).name)}}
    return store.save(state, Progress(), facts=facts).result()


def _weights_and_rest(state: dict[str, Any], key: str | None, where: str) -> tuple[dict[str, Any], dict[str, Any]]:
    if key is None and state and all(isinstance(value, torch.Tensor) for value in state.values()):
        return state, {}
    chosen = key if key is not None else next((k for k in WEIGHTS_KEYS if _is_table(state.get(k))), None)
    if chosen is None or not _is_table(state.get(chosen)):
        raise UsageError(
            f"{where}: {f'{chosen!r} is' if chosen else 'none of its keys is'} a table of tensors; say which key "
            f"holds the weights (weights=…, --weights). There are {', '.join(map(str, list(state)[:8]))}"
        )
    return dict(state[chosen]), {name: value for name, value in state.items() if name != chosen}


def _is_table(value: Any) -> bool:
    return isinstance(value, Mapping) and bool(value) and all(isinstance(t, torch.Tensor) for t in value.values())


def _bare(key: Any, table: Mapping[Any, Any]) -> str:
    """Without DDP's prefix, when every name has it."""
    prefix = "module."
    return str(key).removeprefix(prefix) if all(str(k).startswith(prefix) for k in table) else str(key)
