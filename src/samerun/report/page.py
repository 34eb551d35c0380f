"""The page: one HTML file with its style and its charts in it, which loads nothing and runs nothing."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Iterable, Sequence
from html import escape
from importlib.resources import files
from typing import Final

from samerun.core.units import format_bytes, format_seconds
from samerun.health.records.event import WindowRecord
from samerun.report.chart import Line, Mark, chart, legend
from samerun.report.gather import AttemptTold, CheckpointTold, DoneAgain, RunTold

_MAX_ROWS: Final = 200
"""Of a table: the newest; the page says how many there are more."""


def page(told: RunTold) -> str:
    """A whole document, UTF-8. Everything that came from the run is escaped."""
    body = [
        f"<h1>{escape(told.run)}</h1>",
        f'<p class="where">as read at {_moment(told.read_seconds)} UTC</p>',
        _facts(told),
        *_charts(told),
        _section("Attempts", _attempts(told.attempts) + _again(told.again)),
        _section("Checkpoints", _checkpoints(told)),
        _section("Noticed", _noticed(told)),
        _section(
            "Decided by the run", "".join(f"<pre>{escape(chr(10).join(lines))}</pre>" for lines in told.decisions)
        ),
        _section("Samples", _samples(told)),
        _section("Surroundings", _surroundings(told)),
    ]
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><title>{escape(told.run)}</title>'
        f"<style>{_style()}</style></head>\n<body>\n" + "\n".join(part for part in body if part) + "\n</body></html>\n"
    )


def _style() -> str:
    return files("samerun.report").joinpath("page.css").read_text(encoding="utf-8")


def _facts(told: RunTold) -> str:
    progress = told.progress
    facts: list[tuple[str, str]] = []
    if progress is not None:
        facts += [(name, f"{getattr(progress, name).value:,}") for name in ("updates", "skipped", "samples", "tokens")]
    facts.append(("attempts", str(len(told.attempts))))
    facts.append(("checkpoints", str(len(told.checkpoints))))
    if told.windows:
        facts.append(("last loss", f"{told.windows[-1].loss:.4g}"))
        middle = sorted(record.window_seconds for record in told.windows)[len(told.windows) // 2]
        facts.append(("median window", format_seconds(middle)))
    if told.samples is not None:
        facts.append(("windows lost and done again", str(sum(attempt.num_lost for attempt in told.attempts))))
    return (
        '<dl class="facts">'
        + "".join(f"<div><dt>{escape(k)}</dt><dd>{escape(v)}</dd></div>" for k, v in facts)
        + "</dl>"
    )


def _charts(told: RunTold) -> list[str]:
    if not told.windows:
        where = "health is off, or the run lives on an object store"
        return [_section("Windows", f'<p class="dim">No records of single windows are here: {where}.</p>')]
    marks = [Mark(x=a.first_window, text=f"attempt {a.number}: {a.how}") for a in told.attempts[1:]]
    evaluations = [
        Line(name=name, points=pairs, style=style)
        for (name, pairs), style in zip(told.evaluations.items(), ("second", "third"), strict=False)
    ]

    def line(name: str, read: Callable[[WindowRecord], float], style: str = "first") -> Line:
        return Line(name=name, points=[(record.window, read(record)) for record in told.windows], style=style)

    def gone(read: Callable[[WindowRecord], float]) -> list[Line]:
        points = [(record.window, read(record)) for record in told.lost]
        return [Line(name="lost with a killed attempt", points=points, style="lost")] if points else []

    times = [
        line("window", lambda record: record.window_seconds),
        line("own work", lambda record: record.compute_seconds, "second"),
        line("waiting for data", lambda record: record.data_seconds, "third"),
    ]
    return [
        _figure("Loss", [*gone(lambda r: r.loss), line("loss", lambda r: r.loss), *evaluations], marks),
        _figure("Gradient norm", [line("before clipping", lambda r: r.grad_norm)], marks, is_log=True),
        _figure("Learning rate", [line("first group", lambda r: r.lr)], marks),
        _figure("Seconds of a window", times, marks, is_log=True),
    ]


def _figure(title: str, lines: Sequence[Line], marks: Sequence[Mark], *, is_log: bool = False) -> str:
    drawn = chart(lines, marks, is_log=is_log)
    caption = f"<p>{legend(lines)} <span class='dim'>over windows{', logarithmic' if is_log else ''}"
    caption += f"; dashed: {len(marks)} later starts</span></p>" if marks else "</span></p>"
    return _section(title, drawn + caption if drawn else "")


def _attempts(attempts: Sequence[AttemptTold]) -> str:
    rows = [
        [
            str(attempt.number),
            _moment(attempt.began_seconds),
            attempt.how + "".join(f"\n{note}" for note in attempt.notes),
            attempt.ranks,
            _stretch(attempt),
            (attempt.ended if attempt.is_told_end else f"?{attempt.ended}"),
        ]
        for attempt in reversed(attempts)
    ]
    head = ["attempt", "began (UTC)", "how", "ranks", "windows", "end"]
    return _table(head, rows) if rows else '<p class="dim">No attempt has left a journal here.</p>'


def _again(again: DoneAgain) -> str:
    if not again.num:
        return ""
    said = f"{again.num} windows were lost with an attempt and done again; their loss and gradient norm, as recorded, "
    if again.first_unlike is None:
        return f'<p>{said}<span class="good">are the same in all of them</span>.</p>'
    return f'<p>{said}<span class="bad">differ first in window {again.first_unlike}</span>.</p>'


def _stretch(attempt: AttemptTold) -> str:
    if attempt.stop_window <= attempt.first_window:
        return "none"
    lost = f", {attempt.num_lost} lost" if attempt.num_lost else ""
    return f"{attempt.first_window} to {attempt.stop_window - 1}{lost}"


def _checkpoints(told: RunTold) -> str:
    rows = [
        [
            one.name,
            str(one.attempt),
            f"{one.updates:,}",
            format_bytes(one.num_bytes),
            _clocks(one),
            " ".join((*one.tags, *(["retired"] if one.is_retired else []))),
        ]
        for one in told.checkpoints
    ]
    head = ["checkpoint", "attempt", "updates", "size", "blocked, durable after", "tags"]
    others = "".join(f'<p class="bad">not one: {escape(text)}</p>' for text in told.not_ones)
    return (_table(head, rows) if rows else "<p>None.</p>") + others


def _clocks(one: CheckpointTold) -> str:
    if one.blocked_seconds is None or one.durable_seconds is None:
        return ""
    return f"{format_seconds(one.blocked_seconds)}, {format_seconds(one.durable_seconds)}"


def _noticed(told: RunTold) -> str:
    rows = [[_moment(one.time_seconds), str(one.attempt), one.text] for one in reversed(told.noticed)]
    return _table(["when (UTC)", "attempt", "what"], rows) if rows else "<p>Nothing out of the ordinary.</p>"


def _decision(lines: Sequence[str]) -> str:
    return f"<pre>{escape(chr(10).join(lines))}</pre>"


def _samples(told: RunTold) -> str:
    samples = told.samples
    if samples is None:
        return '<p class="dim">No ledger of samples is here.</p>'
    decided = ", ".join(f"{count} {decision}" for decision, count in samples.decisions.items())
    said = f"<p>{samples.num_windows} windows ({escape(decided)}), positions 0 to {samples.position}. "
    if samples.problems:
        listed = "".join(f"<li>{escape(problem)}</li>" for problem in samples.problems[:_MAX_ROWS])
        return f'{said}<span class="bad">{len(samples.problems)} problems:</span></p><ul>{listed}</ul>'
    if samples.num_checked < samples.num_windows:
        return f"{said}Positions join up; what they held is the source's own order and was not worked out.</p>"
    return f'{said}<span class="good">Each position once, in order, and every window held its samples.</span></p>'


def _surroundings(told: RunTold) -> str:
    rows = [[str(name), str(value)] for name, value in sorted(told.surroundings.items())]
    return _table(["what", "of the newest start"], rows) if rows else ""


def _section(title: str, content: str) -> str:
    return f"<h2>{escape(title)}</h2>\n{content}" if content else ""


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    shown = "".join(f"<tr>{''.join(map(_cell, row))}</tr>" for row in rows[:_MAX_ROWS])
    more = f'<p class="dim">and {len(rows) - _MAX_ROWS} more</p>' if len(rows) > _MAX_ROWS else ""
    return f'<div class="scroll"><table><tr>{"".join(_heads(head))}</tr>{shown}</table></div>{more}'


def _heads(head: Iterable[str]) -> Iterable[str]:
    return (f"<th>{escape(cell)}</th>" for cell in head)


def _cell(text: str) -> str:
    """A leading "?" marks what is not known for sure."""
    if text.startswith("?"):
        return f'<td class="dim">{escape(text[1:])}</td>'
    return f"<td>{escape(text).replace(chr(10), '<br>')}</td>"


def _moment(seconds: float) -> str:
    return f"{datetime.datetime.fromtimestamp(seconds, datetime.UTC):%Y-%m-%d %H:%M:%S}"
