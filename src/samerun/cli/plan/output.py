"""How a plan reaches the terminal: one JSON document, or plain aligned tables that cost no import.

Tables are written with spaces, so they survive pipes, logs and narrow terminals.
"""

from __future__ import annotations

import json
import sys
import textwrap
from collections.abc import Sequence
from typing import Any, Final

from samerun.core.units import SizeBase, format_bytes

WIDTH: Final = 100


def print_json(document: dict[str, Any]) -> None:
    """The one document on standard output."""
    sys.stdout.write(json.dumps(document, ensure_ascii=False, indent=2, allow_nan=False) + "\n")


def print_line(text: str = "") -> None:
    sys.stdout.write(text + "\n")


def print_wrapped(text: str, *, indent: int = 0) -> None:
    """A paragraph, its continuation lines indented."""
    pad = " " * indent
    print_line(textwrap.fill(text, WIDTH, initial_indent=pad, subsequent_indent=pad + "  ", break_long_words=False))


def print_note(text: str) -> None:
    """A message: on standard error, so that standard output stays a table or a document."""
    sys.stderr.write(textwrap.fill(text, WIDTH, subsequent_indent="  ", break_long_words=False) + "\n")


def print_table(header: Sequence[str], rows: Sequence[Sequence[str]], *, right: Sequence[int] = ()) -> None:
    """Columns separated by two spaces; those listed in `right` are right-aligned."""
    lines = [list(header), *(list(row) for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]
    for number, line in enumerate(lines):
        cells = [
            cell.rjust(width) if column in right else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ]
        print_line("  ".join(cells).rstrip())
        if number == 0:
            print_line("  ".join("─" * width for width in widths))


def print_facts(facts: Sequence[tuple[str, str]]) -> None:
    """Names and values, aligned."""
    width = max(len(name) for name, _ in facts)
    for name, value in facts:
        print_line(f"  {name.ljust(width)}  {value}")


def say_bytes(num_bytes: float | None, base: SizeBase = SizeBase.BINARY) -> str:
    return "unknown" if num_bytes is None else format_bytes(num_bytes, base)
