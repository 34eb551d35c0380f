"""The pages are true: blocks run, links lead somewhere, named tests exist, the README shows the example as it is."""

from __future__ import annotations

import fnmatch
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from samerun.cli.main import COMMANDS

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]
EXAMPLE = ROOT / "examples" / "train_gpt.py"
_BLOCK = re.compile(r"(?P<why><!-- not run[^>]*-->\n)?^```(?P<kind>python|console)\n(?P<body>.*?)^```", re.M | re.S)


def blocks(text: str, kind: str) -> list[str]:
    """Bodies of the blocks of one kind that can run; the others say why not in a comment above."""
    return [found["body"] for found in _BLOCK.finditer(text) if found["kind"] == kind and not found["why"]]


def steps(block: str) -> list[tuple[str, str]]:
    """(command, what it prints) of a console block."""
    parts = re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]
    return [(part.partition("\n")[0], part.partition("\n")[2]) for part in parts]


def run(command: str, folder: Path) -> str:
    """Standard output and error of a command of ours, together."""
    program, _, rest = command.partition(" ")
    start = {"python": [sys.executable], "samerun": [sys.executable, "-m", "samerun.cli"]}[program]
    end = subprocess.run(
        [*start, *rest.replace("examples/", f"{EXAMPLE.parent}/").split()],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=folder,
        timeout=100,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=False,
    )
    return end.stdout


def prints(expected: str, shown: str) -> bool:
    """Whether `shown` is `expected`, in which … stands for anything."""
    pattern = re.escape(expected.strip()).replace("…", ".*")
    return re.fullmatch(pattern, shown.strip(), re.DOTALL) is not None


def test_the_readme_shows_the_example_as_it_is() -> None:
    assert blocks((ROOT / "README.md").read_text(), "python") == [EXAMPLE.read_text()]


def test_console_blocks_of_the_readme_print_what_they_show(tmp_path: Path) -> None:
    for block in blocks((ROOT / "README.md").read_text(), "console"):
        for command, expected in steps(block):
            shown = run(command, tmp_path)
            assert prints(expected, shown), f"$ {command}\n{shown}"


def test_another_output_is_noticed() -> None:
    assert prints("update 10  loss …\n", "update 10  loss 5.41\n")
    assert not prints("update 10  loss …\n", "update 11  loss 5.41\n")
    assert not prints("{\n…\n}", "{\n 1\n}\nTraceback")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere_and_named_files_exist(page: Path) -> None:
    text = page.read_text()
    links = [link for link in re.findall(r"\]\(([^)#\s]+)\)", text) if "://" not in link]
    named = re.findall(r"`((?:tests|examples|docs)/[\w./-]+)`", text)
    missing = [link for link in links if not (page.parent / link).exists()]
    missing += [name for name in named if not (ROOT / name).exists()]
    assert missing == []


def test_the_index_leads_to_every_page() -> None:
    index = (ROOT / "docs" / "index.md").read_text()
    pages = {str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs").rglob("*.md")} - {"index.md"}
    assert "(decisions/)" in index  # one link for all of them: a folder of numbered titles needs no list
    assert {page for page in pages if f"({page})" not in index and not page.startswith("decisions/")} == set()


def test_the_readme_lists_every_command() -> None:
    table = (ROOT / "README.md").read_text().split("## The command")[1].split("```")[0]
    listed = {
        name for row in re.findall(r"^\| `.*", table, re.M)[1:] for name in re.findall(r"`(\w+)`", row.split("|")[1])
    }
    assert listed == set(COMMANDS)


def test_the_changelog_has_the_form_it_names() -> None:
    headings = re.findall(r"^## .*$|^### .*$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert headings[0] == "## [Unreleased]"
    kinds = {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}
    for heading in headings:
        is_version = fnmatch.fnmatch(heading, "## [[]*]*")
        assert is_version or heading.removeprefix("### ") in kinds, heading
