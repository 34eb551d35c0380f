"""Code on the pages runs, commands parse, and names exist. What cannot run says why on the page."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import io
import re
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import typer

import samerun
import samerun.cli.main as cli
from docs.test_pages import PAGES, ROOT, blocks, prints, steps

LESSONS = ROOT / "docs" / "lessons.md"


def trained(path: Path) -> samerun.Run:
    model = torch.nn.Linear(3, 1)
    data = samerun.Data(torch.utils.data.TensorDataset(torch.randn(30_000, 3)), global_batch=8, micro_batch=4, seed=1)
    optimizer = torch.optim.AdamW(model.parameters())
    run = samerun.Run(path, model=model, optimizer=optimizer, data=data)
    with run:
        for window in run.windows(until=1):
            for (batch,) in window:
                window.backward(model(batch).square().sum(), len(batch))
            window.step()
    return run


def for_health(place: Path) -> dict[str, Any]:
    trained(place / "runs" / "policy-sft")
    return {"samerun": samerun}


def for_format(place: Path) -> dict[str, Any]:
    trained(place / "RUN")
    next((place / "RUN" / "checkpoints").iterdir()).rename(place / "RUN" / "checkpoints" / "NAME")
    return {}


def for_stopping(_: Path) -> dict[str, Any]:
    model = torch.nn.Linear(3, 1)
    data = samerun.Data(list(range(8)), global_batch=8, micro_batch=4, seed=1)
    return {"samerun": samerun, "model": model, "optimizer": torch.optim.SGD(model.parameters()), "data": data}


def for_dcp(place: Path) -> dict[str, Any]:
    return {"state": {"w": torch.ones(3), "step": 7}, "path": str(place / "dcp")}


NEEDS: dict[str, Callable[[Path], dict[str, Any]]] = {
    "dcp.md": for_dcp,
    "format.md": for_format,
    "health.md": for_health,
    "stopping.md": for_stopping,
}
"""Page → what its Python blocks take as given, made in an empty folder."""

PYTHON = [page for page in PAGES if blocks(page.read_text(), "python") and page.name not in ("README.md", "plan.md")]
"""The README's block is `examples/train_gpt.py`; those of the plan page are doctests."""


@pytest.mark.filterwarnings("ignore::UserWarning")  # DCP's, about saving without a process group
@pytest.mark.parametrize("page", PYTHON, ids=lambda page: page.name)
def test_python_blocks_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    given = NEEDS[page.name](tmp_path) if page.name in NEEDS else {}
    for block in blocks(page.read_text(), "python"):
        exec(compile(block, str(page), "exec"), dict(given))


def lesson_output(command: str) -> str:
    """What `python examples/NAME.py …` prints, in this process: importing torch anew costs more than the lesson."""
    program, path, *words = shlex.split(command)
    assert (program, Path(path).parent.name) == ("python", "examples")
    spec = importlib.util.spec_from_file_location(Path(path).stem, ROOT / path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        module.main(words) if words else module.main()
    return said.getvalue()


@pytest.fixture
def no_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["python"])


LESSON_STEPS = [step for block in blocks(LESSONS.read_text(), "console") for step in steps(block)]


@pytest.mark.usefixtures("no_arguments")
@pytest.mark.parametrize(("command", "expected"), LESSON_STEPS, ids=lambda text: text.split("\n")[0][-40:])
def test_lessons_print_what_the_page_shows(command: str, expected: str) -> None:
    shown = lesson_output(command)
    assert prints(expected, shown), shown


def test_the_page_of_lessons_shows_every_program() -> None:
    files = [file.name for file in (ROOT / "examples").glob("*.py")]
    programs = {f"examples/{name}" for name in files if name.startswith(("lesson_", "exercise_"))}
    text = LESSONS.read_text()
    assert set(re.findall(r"^\| `(examples/\S+)`", text, re.M)) == programs
    assert set(re.findall(r"^\$ python (\S+)", text, re.M)) == programs


_FENCES = re.compile(r"^```(\w*)\n(.*?)^```", re.M | re.S)


def test_every_block_of_the_readme_is_run_or_is_the_tree() -> None:
    kinds = [(kind, body) for kind, body in _FENCES.findall((ROOT / "README.md").read_text())]
    assert {kind for kind, _ in kinds} <= {"python", "console", ""}
    bare = [body for kind, body in kinds if kind == ""]
    assert len(bare) == 1 and bare[0].startswith("errors.py ")


def commands_on(text: str) -> list[str]:
    """Every whole command line of samerun in a block, with or without a prompt."""
    lines = [line for _, body in _FENCES.findall(text) for line in body.splitlines()]
    return [line.removeprefix("$ ") for line in lines if re.match(r"(\$ )?samerun [a-z]", line)]


def parse(command: str) -> None:
    """Raises for a command or an option that there is not; runs nothing. `plan` is run by its own test."""
    _, name, *words = shlex.split(command)
    if name == "plan":
        return
    top = typer.main.get_command(cli.build_app(name)).commands[name]  # type: ignore[attr-defined]
    top.make_context(name, words)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_on_the_pages_parse(page: Path) -> None:
    for command in commands_on(page.read_text()):
        parse(command)


def test_a_command_that_there_is_not_is_noticed() -> None:
    page = "```\n$ samerun ls runs/x\nsamerun lsx\n```\nsamerun of old"
    assert commands_on(page) == ["samerun ls runs/x", "samerun lsx"]
    with pytest.raises(KeyError):
        parse("samerun lsx runs/x")
    with pytest.raises(Exception, match="No such option: --colour"):  # of typer's own copy of click
        parse("samerun ls runs/x --colour")


def resolves(dotted: str) -> bool:
    parts = dotted.split(".")
    found: Any = None
    for length in range(len(parts), 0, -1):
        with contextlib.suppress(ImportError):
            found = importlib.import_module(".".join(parts[:length]))
            break
    for name in parts[length:]:
        if not hasattr(found, name):
            return False
        found = getattr(found, name)
    return True


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_names_on_the_pages_exist(page: Path) -> None:
    named = set(re.findall(r"(?<![\w./-])samerun(?:\.[A-Za-z_]\w*)+(?![\w.]*\.v\d)", page.read_text()))
    schemas = {name for name in named if re.search(r"\.v\d+$", name)}
    assert {name for name in named - schemas if not resolves(name)} == set()


def test_a_name_that_there_is_not_is_noticed() -> None:
    assert resolves("samerun.checkpoint.Store.save")
    assert not resolves("samerun.checkpoint.Store.rescue")
    assert not resolves("samerun.checkpoints")
