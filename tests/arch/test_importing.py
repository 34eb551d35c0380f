"""Importing has no effects, and the parts that promise it load where torch cannot be imported."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from arch.house_rules import folder_of, modules

MODULES = sorted(name for name in modules() if not name.endswith("__main__"))

EFFECTS = """
import importlib, json, logging, os, random, signal, sys, threading, warnings
import numpy, torch, torch.distributed.run, torch.distributed.fsdp, torch.distributed.tensor, torch.utils.data
import torch.distributed.elastic.multiprocessing.errors
import msgspec, safetensors.torch, xxhash, typer, rich.console, rich.progress, rich.table

def snapshot():
    return {
        "signals": {number: signal.getsignal(number) for number in signal.valid_signals()},
        "threads": [thread.name for thread in threading.enumerate()],
        "environment": dict(os.environ),
        "warnings": list(warnings.filters),
        "python stream": random.getstate(),
        "numpy stream": numpy.random.get_state()[1].tobytes(),
        "torch stream": torch.get_rng_state().numpy().tobytes(),
        "log handlers": [list(logging.getLogger(n).handlers) for n in (None, "torch", "samerun")],
        "log level": logging.getLogger().level,
        "numeric settings": (
            torch.get_num_threads(), torch.get_default_dtype(), torch.are_deterministic_algorithms_enabled(),
        ),
        "exception hooks": (sys.excepthook, threading.excepthook),
        "folder": os.getcwd(),
    }

effects = {}
for name in sys.argv[1:]:
    before = snapshot()
    importlib.import_module(name)
    after = snapshot()
    effects[name] = [what for what in before if before[what] != after[what]]
print(json.dumps(effects))
"""

NO_TORCH = """
import importlib, sys

class Refuses:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in REFUSED:
            raise ImportError(f"{name} is not to be imported here")
        return None

REFUSED = set(sys.argv[1].split(","))
sys.meta_path.insert(0, Refuses())
for name in sys.argv[2:]:
    importlib.import_module(name)
"""


def python(code: str, *arguments: str, path: Path | None = None) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-c", code, *arguments]
    return subprocess.run(words, capture_output=True, text=True, cwd=path, timeout=100, check=False)


NAUGHTY = {
    "signals": "import signal; signal.signal(signal.SIGTERM, lambda *_: None)",
    "threads": "import threading; threading.Thread(target=threading.Event().wait, daemon=True, name='stray').start()",
    "environment": "import os; os.environ['SAMERUN_X'] = '1'",
    "warnings": "import warnings; warnings.simplefilter('ignore')",
    "python stream": "import random; random.random()",
    "numpy stream": "import numpy; numpy.random.rand()",
    "torch stream": "import torch; torch.rand(1)",
    "log handlers": "import logging; logging.getLogger().addHandler(logging.NullHandler())",
    "numeric settings": "import torch; torch.set_default_dtype(torch.float64)",
}
"""What a module must not do on import → a module that does."""


@pytest.fixture(scope="module")
def effects(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """Module → what its import changed, in one fresh process; the naughty modules come last."""
    folder = tmp_path_factory.mktemp("naughty")
    names = {what: f"naughty_{number}" for number, what in enumerate(NAUGHTY)}
    for what, name in names.items():
        (folder / f"{name}.py").write_text(NAUGHTY[what])
    end = python(EFFECTS, *MODULES, *names.values(), path=folder)
    assert end.returncode == 0, end.stderr
    found: dict[str, list[str]] = json.loads(end.stdout)
    return {**found, **{what: found[name] for what, name in names.items()}}


def test_importing_every_module_has_no_effects(effects: dict[str, list[str]]) -> None:
    assert {name: effects[name] for name in MODULES if effects[name]} == {}


@pytest.mark.parametrize("what", NAUGHTY)
def test_an_effect_on_import_is_noticed(effects: dict[str, list[str]], what: str) -> None:
    assert effects[what] == [what]


LIGHT = [
    name
    for name in MODULES
    if folder_of(name) in (None, "errors", "core", "storage", "plan", "format", "preempt")
    or (folder_of(name) == "data" and ".fetch." not in name and ".adapters." not in name)
    or (folder_of(name) == "health" and name != "samerun.health.attach")
    or name.startswith(("samerun.cli.plan", "samerun.cli.main", "samerun.report"))
    or name in {f"samerun.checkpoint.{part}" for part in ("catalog", "retention", "attempts", "verify")}
]


def test_the_light_parts_load_without_torch() -> None:
    end = python(NO_TORCH, "torch", *LIGHT)
    assert (end.returncode, end.stderr) == (0, "")


def test_plans_load_without_numpy_too() -> None:
    end = python(NO_TORCH, "torch,numpy", *[name for name in LIGHT if ".plan" in name])
    assert (end.returncode, end.stderr) == (0, "")


def test_the_check_notices_a_part_that_needs_torch() -> None:
    end = python(NO_TORCH, "torch", "samerun.state.rng")
    assert end.returncode == 1
    assert "torch is not to be imported here" in end.stderr


@pytest.mark.parametrize(
    "words",
    [
        ["--help"],
        ["--version"],
        ["plan", "--help"],
        ["plan", "interval", "--help"],
        ["plan", "memory", "--params", "70e9", "--method", "qlora", "--device", "48GiB"],
    ],
)
def test_quick_commands_run_without_torch(words: list[str]) -> None:
    call = textwrap.dedent(
        f"""
        sys.argv = ["samerun", *{words!r}]
        from samerun.cli.main import main
        main()
        """
    )
    end = python(NO_TORCH + call, "torch")
    assert end.returncode == 0, end.stderr
    assert "Traceback" not in end.stderr
    assert end.stdout
