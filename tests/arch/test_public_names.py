"""Every name that a package promises is there, sorted, and says what it is."""

from __future__ import annotations

import dataclasses
import importlib
import types
from typing import Any

import pytest

from arch.house_rules import modules

MODULES = sorted(modules())

UNDOCUMENTED = frozenset({
    "samerun.checkpoint.Catalog",
})  # fmt: skip
"""Public names that do not yet say what they are. Only ever shrinks."""


_UNSAID = " has no docstring"


def name_faults(module: Any) -> list[str]:
    names = list(getattr(module, "__all__", []))
    faults = [] if names == sorted(names) else [f"{module.__name__}.__all__ is not sorted"]
    if "__dir__" in vars(module) and dir(module) != names:  # the list is written out for type checkers
        faults.append(f"{module.__name__}.__all__ is not what it loads: {sorted(set(dir(module)) ^ set(names))}")
    for name in names:
        if not hasattr(module, name):
            faults.append(f"{module.__name__}.{name} does not exist")
        elif not _own_docstring(getattr(module, name)):
            faults.append(f"{module.__name__}.{name}{_UNSAID}")
    return faults


def _own_docstring(value: Any) -> bool:
    if not isinstance(value, (type, types.FunctionType)):
        return True  # a constant: its docstring, if any, is not kept at run time
    text = value.__dict__.get("__doc__") if isinstance(value, type) else value.__doc__
    written_by_dataclass = dataclasses.is_dataclass(value) and (text or "").startswith(f"{value.__name__}(")
    return bool(text) and not written_by_dataclass


@pytest.mark.parametrize("name", MODULES)
def test_public_names_exist_sorted_and_documented(name: str) -> None:
    if name.endswith("__main__"):
        pytest.skip("running it is its purpose")
    module = importlib.import_module(name)
    assert module.__doc__, f"{name} does not say what it is"
    without = {fault.removesuffix(_UNSAID) for fault in name_faults(module) if fault.endswith(_UNSAID)}
    assert [fault for fault in name_faults(module) if not fault.endswith(_UNSAID)] == []
    assert without == {listed for listed in UNDOCUMENTED if listed.rpartition(".")[0] == name}


def test_a_broken_list_of_names_is_rejected() -> None:
    module = types.ModuleType("made_up")

    def said() -> None:
        """Says."""

    def unsaid() -> None: ...

    @dataclasses.dataclass
    class Unsaid:
        x: int

    module.said, module.unsaid, module.Unsaid = said, unsaid, Unsaid  # type: ignore[attr-defined]
    for names in (["unsaid"], ["gone"], ["Unsaid"], ["unsaid", "said"]):
        module.__all__ = names  # type: ignore[attr-defined]
        assert name_faults(module) != [], names
    module.__all__ = ["said"]  # type: ignore[attr-defined]
    assert name_faults(module) == []
