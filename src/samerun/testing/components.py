"""What `Run(extra={"ema": ema})` needs of an object: through a real checkpoint into a fresh one, and on as its twin.

The checkpoint is a `ckpt.v1` in memory, written and read by the code that writes and reads a run's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from samerun.checkpoint import Store
from samerun.core.progress import Progress
from samerun.errors import SamerunError, UsageError
from samerun.state.extra import Extra, Stateful
from samerun.state.fingerprint import fingerprint
from samerun.state.rng import preserved_rng
from samerun.storage.memory import Memory

T = TypeVar("T", bound=Stateful)


def check_component(make: Callable[[], T], change: Callable[[T], Any], *, changes: int = 4) -> list[str]:
    """What is wrong with an object of yours, as sentences; empty when a resumed run gets it back as it was.

        assert check_component(lambda: EMA(make_model()), lambda ema: ema.update()) == []

    `make` gives a fresh one, as a new process would, before anything is restored; `change` moves one on, as the loop
    body does, without drawing anything. After each number of changes up to `changes` the object is saved, restored
    into a fresh one and into one that was used before, and changed on beside the one that went on. Raises UsageError
    when `change` changes nothing that the state holds: nothing could be told then. Ends at what the state does not
    show: two objects whose states stay alike count as alike.
    """
    if changes < 1:
        raise UsageError(f"changes={changes}: at least 1 is needed")
    with preserved_rng():
        return _problems(make, change, changes)


def _problems(make: Callable[[], T], change: Callable[[T], Any], changes: int) -> list[str]:
    try:
        before, after, again = _held(make()), *(_held(_changed(make(), change, changes + 1)) for _ in range(2))
    except SamerunError as error:
        return [f"state_dict() cannot be saved: {error}"]
    if before == after:
        raise UsageError("change() changed nothing that state_dict() holds: nothing can be told of this object")
    if after != again:
        return ["two fresh objects, changed alike, hold different states: there is no twin to compare with"]
    for number in range(changes + 1):
        live = _changed(make(), change, number)
        for what, used in (("a fresh one", make()), ("one that was used before", _changed(make(), change, 2))):
            where = f"saved after {number} changes and restored into {what}"
            try:
                _through_a_checkpoint(live, used)
            except (SamerunError, KeyError, TypeError, ValueError, RuntimeError) as error:
                return [f"{where}: {type(error).__name__}: {error}"]
            if unlike := _unlike(live, used):
                return [f"{where}: {unlike} came back as something else"]
            change(used)
            if unlike := _unlike(_changed(make(), change, number + 1), used):
                return [f"{where}: after one more change {unlike} is not the twin's; what does state_dict() leave out?"]
    return []


def _changed(value: T, change: Callable[[T], Any], times: int) -> T:
    for _ in range(times):
        change(value)
    return value


def _held(value: Stateful) -> dict[str, str]:
    return fingerprint(Extra("mine", value).capture())


def _unlike(one: Stateful, other: Stateful) -> str:
    """Names of what the two hold differently."""
    first, second = _held(one), _held(other)
    unlike = {name.partition(":")[0] for name in {*first, *second} if first.get(name) != second.get(name)}
    names = sorted({name.removesuffix(".__tensor__") or "the state" for name in unlike})
    return ", ".join(names[:3]) + (", …" if len(names) > 3 else "")


def _through_a_checkpoint(saved: Stateful, into: Stateful) -> None:
    store, before, after = Store(Memory()), Extra("mine", saved), Extra("mine", into)
    entry = store.save({before.name: before.capture()}, Progress(), facts={}).result()
    after.restore(store.open(entry).source(after.name))
