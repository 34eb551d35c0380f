"""The page of reported faults names tests that exist, in the files that it names."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "reports.md"


def missing(page: str) -> list[str]:
    """Files and tests that a page names and that do not exist."""
    found, tests = [], set()
    for name in re.findall(r"`(tests/[\w/]+\.py|test_\w+)`", page):
        if name.startswith("tests/"):
            path = ROOT / name
            tree = ast.parse(path.read_text()) if path.exists() else None
            tests = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)} if tree else set()
            found += [] if tree else [name]
        elif name not in tests:
            found.append(name)
    return found


def test_every_named_test_exists() -> None:
    assert missing(PAGE.read_text()) == []


def test_a_test_that_is_gone_is_noticed() -> None:
    assert missing("`tests/docs/test_reports_page.py` `test_no_such_thing`; `tests/none.py`") == [
        "test_no_such_thing",
        "tests/none.py",
    ]
