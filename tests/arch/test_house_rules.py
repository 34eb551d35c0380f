"""The house holds: import order, sizes, no pickle, one reader of the environment, the README's tree. Each with a
control: a snippet that the check must reject."""

from __future__ import annotations

import pytest

from arch.house_rules import (
    MAX_MODULES,
    PACKAGE,
    ROOT,
    environment_faults,
    import_faults,
    list_faults,
    modules,
    pickle_faults,
    size_faults,
    tree_of_readme,
    tree_on_disk,
)

MODULES = modules()
KNOWN = frozenset(MODULES)

OVERSIZED = {
    "samerun.cli.drill:drill()": (16, "the options of a command; typer reads them off the signature"),
    "samerun.step.loop:Step.__init__()": (11, "the options of a training, as Run has them"),
    "samerun.run.run:Run.__init__()": (25, "the options of a whole training; each is a word of its own"),
}
"""Over a limit of lines or parameters → (what is allowed, why). Only ever shrinks."""

CROWDED = {}

ENVIRONMENT = {
    "samerun.core.environ": "the one reader",
    "samerun.drill.processes": "hands the whole environment on to a child process; reads nothing",
    "samerun.launch.torchrun": "sets torchrun's own default for its children, as torchrun does",
}

PICKLES = {
    "samerun.convert.dcp_records": "DCP's metadata is a raw pickle; class names only find empty records",
    "samerun.convert.torch_file": "exports to a file of torch.save are asked for by name",
    "samerun.dcp.values": "stock planners take values as bytes of torch.save; these are built from verified JSON",
}
"""Where something is pickled, or read that others pickled → why no code can run from it."""


def faults_everywhere(check: object) -> list[str]:
    return [f"{name}: {fault}" for name, path in MODULES.items() for fault in check(path.read_text())]  # type: ignore[operator]


def test_folders_import_only_from_lines_before_their_own() -> None:
    faults = [
        fault
        for name, path in MODULES.items()
        for fault in import_faults(path.read_text(), name, is_package=path.name == "__init__.py", known=KNOWN)
    ]
    assert faults == []


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("samerun.core.clock", "from samerun.run import Run"),
        ("samerun.core.clock", "def late():\n    import samerun.checkpoint.store"),
        ("samerun.data.order", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from samerun.step import x"),
        ("samerun.demo.train", "import samerun.cli.main"),
        ("samerun.state.rng", "from ..step import window"),
        ("samerun.storage.api", "import importlib\nimportlib.import_module('samerun.checkpoint.store')"),
        ("samerun.run.run", "from samerun.testing import contract"),
        ("samerun.attic.box", "import samerun.core"),
        ("samerun.demo.train", "from samerun import lessons"),
    ],
)
def test_an_import_against_the_order_is_rejected(module: str, source: str) -> None:
    assert import_faults(source, module, known=KNOWN | {"samerun.lessons"}) != []


def test_imports_along_the_order_pass() -> None:
    source = "import samerun\nfrom samerun.core import clock\nfrom . import attempt\nfrom samerun.errors import Refused"
    source += '\ncommand = ["python", "-m", "samerun.cli"]'
    assert import_faults(source, "samerun.run.run", known=KNOWN) == []


def test_files_functions_and_parameter_lists_stay_small() -> None:
    over = {key: size for name, path in MODULES.items() for key, size in size_faults(path.read_text(), name).items()}
    assert list_faults(over, OVERSIZED) == []


def test_no_folder_is_crowded() -> None:
    count = {
        ".".join(folder.relative_to(PACKAGE).parts): len([p for p in folder.glob("*.py") if p.name != "__init__.py"])
        for folder in (PACKAGE, *PACKAGE.rglob("*/"))
    }
    assert list_faults({name: number for name, number in count.items() if number > MAX_MODULES}, CROWDED) == []


def test_what_is_too_large_is_rejected() -> None:
    body = "\n".join("    x = 1" for _ in range(61))
    assert size_faults(f"def long():\n{body}\n", "m") == {"m:long": 61}
    assert size_faults(f'def long():\n    """Said."""\n{body}\n', "m") == {"m:long": 61}
    names = ", ".join(f"a{i}" for i in range(11))
    assert size_faults(f"class C:\n    def wide(self, *, {names}): ...\n", "m") == {"m:C.wide()": 11}
    assert size_faults("x = 1\n" * 401, "m") == {"m": 401}
    assert size_faults("x = 1\n" * 400, "m") == {}


def test_the_list_of_exceptions_only_shrinks() -> None:
    assert list_faults({"m": 500}, {}) != []
    assert list_faults({"m": 500}, {"m": (499, "grew")}) != []
    assert list_faults({}, {"m": (499, "not needed any more")}) != []
    assert list_faults({"m": 499}, {"m": (499, "a reason")}) == []


def test_nothing_pickles() -> None:
    faults = {fault.split(":")[0] for fault in faults_everywhere(pickle_faults)}
    assert faults == set(PICKLES)


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from pickle import loads",
        "import torch\ntorch.save({}, 'x')",
        "import torch\ntorch.load('x')",
        "import torch\ntorch.load('x', weights_only=False)",
        "from torch import load",
        "import torch.distributed as dist\ndist.all_gather_object([], 1)",
        "from torch.distributed import broadcast_object_list",
        "import numpy\nnumpy.load('x', allow_pickle=True)",
    ],
)
def test_pickling_is_rejected(source: str) -> None:
    if source.startswith("from torch.distributed"):
        source += "\nbroadcast_object_list([1])"
    assert pickle_faults(source) != []


def test_weights_only_loading_passes() -> None:
    assert pickle_faults("import torch\ntorch.load('x', weights_only=True)") == []


def test_the_environment_has_one_reader() -> None:
    readers = {name for name, path in MODULES.items() if environment_faults(path.read_text())}
    assert readers == set(ENVIRONMENT)


@pytest.mark.parametrize(
    "source",
    ["import os\nos.environ['X']", "import os\nos.getenv('X')", "from os import environ", "from os import getenv"],
)
def test_reading_the_environment_is_rejected(source: str) -> None:
    assert environment_faults(source) != []


def test_the_readme_draws_the_tree_that_is_on_the_disk() -> None:
    assert set(tree_of_readme((ROOT / "README.md").read_text())) == tree_on_disk()


def test_a_tree_that_is_not_on_the_disk_is_rejected() -> None:
    drawn = tree_of_readme("## The house\n\n```\nerrors.py   all errors\nattic/      old things\n```\n")
    assert set(drawn) == {"errors.py", "attic/"}
    assert set(drawn) != tree_on_disk()
