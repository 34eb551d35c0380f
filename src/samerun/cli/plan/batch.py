"""`samerun plan batch` and `schedule`: batch arithmetic, and what a change of batch does to a schedule."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from samerun.cli.plan import output
from samerun.cli.plan.parser import REAL, WHOLE, Parser, kind, member, values
from samerun.core.units import Amount, AmountUnit, parse_amount
from samerun.errors import ExitCode, UsageError
from samerun.plan import schedule as schedules
from samerun.plan.batch import BatchPlan, BatchRequest, Lengths, measure_lengths, on_ranks, plan_batch
from samerun.plan.mesh import Mesh, refuse_overlapping
from samerun.plan.record import diff, to_json, tree

_CLOCKS: Final = {
    AmountUnit.UPDATES: schedules.Clock.UPDATES,
    AmountUnit.SAMPLES: schedules.Clock.SAMPLES,
    AmountUnit.TOKENS: schedules.Clock.TOKENS,
}
_AMOUNT: Final = kind(parse_amount)


def batch(arguments: Sequence[str]) -> ExitCode:
    """B = micro · K · D, solved."""
    parser = Parser(
        name="batch",
        summary="Global batch = micro batch × microbatches K × replicas D; leave one out and it is solved.",
        examples=(
            "--global 64 --micro 2 --ranks 8 --tp 2",
            "--micro 2 --accumulate 8 --replicas 4 --seq 4096",
            "--global 64 --micro 2 --ranks 8 --lose 3",
        ),
        notes="D = ranks / (TP·PP·CP). Expert-parallel and hybrid groups share ranks: state --replicas yourself.",
    )
    _add_batch(parser)
    options = parser.parse_args(arguments)
    refuse_overlapping(num_expert=options.ep, is_hybrid=options.hybrid)
    plan = plan_batch(_request(options))
    after, idle = None, 0
    if options.lose:
        ranks = plan.mesh.num_ranks if plan.mesh else plan.num_replicas
        if options.lose >= ranks:
            raise UsageError(
                f"--lose {options.lose} of {ranks} ranks leaves none; write --lose {max(1, ranks - 1)} or less"
            )
        after, idle = on_ranks(plan, ranks - options.lose)
    if options.json:
        document = to_json(plan)
        if after is not None:
            changes = [tree(change) for change in diff(plan, after)]
            document |= {"after_loss": to_json(after), "num_idle_ranks": idle, "changes": changes}
        output.print_json(document)
    else:
        _print_batch(plan, after, idle)
    return ExitCode.DONE


def schedule(arguments: Sequence[str]) -> ExitCode:
    """Milestones on every clock, and a remap."""
    parser = Parser(
        name="schedule",
        summary="Warm-up and decay in updates, samples and tokens; with --to, what another batch does to them.",
        examples=(
            "--lr 3e-4 --warmup '100 updates' --total '2000 updates' --global 64",
            "--lr 3e-4 --warmup '100 updates' --total '2000 updates' --global 64 --to 128 --at 50 --keep data",
        ),
    )
    _add_schedule(parser)
    options = parser.parse_args(arguments)
    lengths = _lengths(options)
    plan = schedules.plan_schedule(
        _schedule(options), options.total_batch, tokens_per_sample=None if lengths is None else lengths.mean_tokens
    )
    if options.to is not None:
        plan = schedules.remap(plan, options.to, done_updates=options.at, keep=options.keep)
    if options.json:
        output.print_json(to_json(plan))
    else:
        _print_schedule(plan)
    return ExitCode.DONE


def _add_batch(parser: Parser) -> None:
    add = parser.add_argument
    add("--global", dest="total", type=WHOLE, metavar="B", help="samples per update, over all replicas")
    add("--micro", type=WHOLE, metavar="B", help="samples of one rank's microbatch")
    add("--accumulate", type=WHOLE, metavar="K", help="microbatches of a replica in a window")
    add("--replicas", type=WHOLE, metavar="D", help="data-parallel replicas, instead of a mesh")
    add("--ranks", type=WHOLE, metavar="N", help="devices of a mesh")
    for name, what in (("tp", "tensor"), ("pp", "pipeline"), ("cp", "context")):
        add(f"--{name}", type=WHOLE, default=1, metavar="N", help=f"{what}-parallel ranks")
    add("--ep", type=WHOLE, default=1, metavar="N", help="expert-parallel ranks: refused, state --replicas")
    add("--hybrid", action="store_true", help="hybrid groups: refused, state --replicas")
    add("--lose", type=WHOLE, metavar="N", help="what changes when N ranks are lost")
    _add_lengths(parser)


def _add_lengths(parser: Parser) -> None:
    parser.add_argument("--seq", type=WHOLE, metavar="S", help="tokens of every sample")
    parser.add_argument("--lengths", metavar="FILE", help="measured supervised tokens, one sample a line")


def _lengths(options: argparse.Namespace) -> Lengths | None:
    if options.lengths is not None and options.seq is not None:
        raise UsageError("--seq and --lengths both say how long samples are; give one of them")
    if options.seq is not None:
        return Lengths(mean_tokens=options.seq)
    if options.lengths is None:
        return None
    try:
        lines = Path(options.lengths).read_text(encoding="utf-8").split()
        return measure_lengths([int(line) for line in lines])
    except (OSError, ValueError) as error:
        raise UsageError(f"--lengths {options.lengths}: {error}; give a file with one whole number a line") from error


def _request(options: argparse.Namespace) -> BatchRequest:
    mesh = None
    if options.ranks is not None:
        mesh = Mesh(num_ranks=options.ranks, num_tensor=options.tp, num_pipeline=options.pp, num_context=options.cp)
    elif max(options.tp, options.pp, options.cp) > 1:
        raise UsageError("--tp, --pp and --cp need --ranks; write it like --ranks 8 --tp 2")
    return BatchRequest(
        global_batch=options.total,
        micro_batch=options.micro,
        num_accumulated=options.accumulate,
        num_replicas=options.replicas,
        mesh=mesh,
        lengths=_lengths(options),
    )


def _print_batch(plan: BatchPlan, after: BatchPlan | None, idle: int) -> None:
    sides = [plan] if after is None else [plan, after]
    header = ("", "value") if after is None else ("", "before", "after")
    rows = [[name, *(say(side) for side in sides)] for name, say in _LINES]
    rows = [row for row in rows if any(row[1:])]
    output.print_table(header, rows, right=tuple(range(1, len(header))))
    output.print_line()
    output.print_line(f"{plan.global_batch} = {_product(plan)}")
    if after is not None:
        slower = after.num_accumulated / plan.num_accumulated
        output.print_line(f"{after.global_batch} = {_product(after)}")
        output.print_wrapped(
            f"Global batch, learning rate and samples per update stay; a window takes about {slower:.3g} × as long; "
            f"{idle} ranks idle. Sums run in another order: not bitwise the same, the same samples."
        )


def _product(plan: BatchPlan) -> str:
    if plan.num_replicas_with_fewer == 0:
        return f"micro {plan.micro_batch} × K {plan.num_accumulated} × D {plan.num_replicas}"
    full = plan.num_replicas - plan.num_replicas_with_fewer
    most, fewer = plan.num_accumulated, plan.num_replicas_with_fewer
    return f"micro {plan.micro_batch} × ({full} replicas × K {most} + {fewer} × K {most - 1})"


_LINES: Final[tuple[tuple[str, Any], ...]] = (
    ("mesh", lambda p: str(p.mesh) if p.mesh else ""),
    ("replicas D", lambda p: str(p.num_replicas)),
    ("micro batch", lambda p: str(p.micro_batch)),
    ("microbatches K", lambda p: str(p.num_accumulated)),
    ("replicas with K − 1", lambda p: str(p.num_replicas_with_fewer) if p.num_replicas_with_fewer else ""),
    ("global batch", lambda p: str(p.global_batch)),
    ("tokens per update", lambda p: _say_tokens(p)),
)


def _say_tokens(plan: BatchPlan) -> str:
    if plan.tokens_per_update is None:
        return ""
    spread = f" ± {1.96 * plan.tokens_deviation:,.0f}" if plan.tokens_deviation else ""
    return f"{plan.tokens_per_update:,.0f}{spread}"


def _add_schedule(parser: Parser) -> None:
    add = parser.add_argument
    add("--lr", type=REAL, required=True, help="peak learning rate")
    add("--warmup", type=_AMOUNT, required=True, metavar="AMOUNT", help="'100 updates', '6400 samples' or '1e6 tokens'")
    add("--total", type=_AMOUNT, required=True, metavar="AMOUNT", help="in the same unit: the schedule's clock")
    add("--decay", type=member(schedules.Decay), default=schedules.Decay.COSINE, help=values(schedules.Decay))
    add("--final", type=REAL, default=0.0, metavar="SHARE", help="of the peak, at the end")
    add("--global", dest="total_batch", type=WHOLE, required=True, metavar="B", help="samples per update")
    add("--to", type=WHOLE, metavar="B", help="another batch, from --at on")
    add("--at", type=int, default=0, metavar="U", help="updates done when it changes (default: 0)")
    add("--keep", type=member(schedules.Keep), help="data or updates: what milestones keep (update clock)")
    _add_lengths(parser)


def _schedule(options: argparse.Namespace) -> schedules.Schedule:
    warmup: Amount = options.warmup
    total: Amount = options.total
    if warmup.unit is not total.unit or total.unit not in _CLOCKS:
        raise UsageError(
            f"--warmup ({warmup}) and --total ({total}) must count the same thing: updates, samples or tokens; "
            "write it like --warmup '100 updates' --total '2000 updates'"
        )
    return schedules.Schedule(
        clock=_CLOCKS[total.unit],
        peak_lr=options.lr,
        warmup=warmup.value,
        total=total.value,
        decay=options.decay,
        final_fraction=options.final,
    )


def _print_schedule(plan: schedules.SchedulePlan) -> None:
    rows = [_milestone("warm-up ends", plan.warmup), _milestone("total", plan.total)]
    remap = plan.remap
    if remap is not None:
        rows.append(_milestone("batch changes", remap.done))
        rows.append(_milestone("warm-up ends, after", remap.warmup))
        rows.append(_milestone("total, after", remap.total))
    batches = f"{plan.global_batch}" + ("" if remap is None else f" → {remap.new_batch}")
    output.print_table((f"batch {batches}", "updates", "samples", "tokens"), rows, right=(1, 2, 3))
    output.print_line()
    if remap is not None:
        output.print_wrapped(
            f"{remap.remaining_updates} updates remain at a batch of {remap.new_batch}. {_KEPT[remap.keep]}"
        )
        output.print_line()
    for line in _picture(plan):
        output.print_line(line)


_KEPT: Final = {
    schedules.Keep.DATA: "Data kept: the rate stays the same function of the sample, so the clock counts samples now.",
    schedules.Keep.UPDATES: "Updates kept: milestones stay at the same update, and the data they need changes.",
}


def _milestone(name: str, amounts: schedules.Amounts) -> list[str]:
    tokens = "" if amounts.tokens is None else f"{amounts.tokens:,.0f}"
    return [name, f"{amounts.updates:,.6g}", f"{amounts.samples:,.0f}", tokens]


def _picture(plan: schedules.SchedulePlan) -> list[str]:
    """The learning rate against samples, before and after a remap, one column a place."""
    width, height = 72, 8
    remap = plan.remap
    end = plan.total.samples if remap is None else max(plan.total.samples, remap.total.samples)
    lines = [[" "] * width for _ in range(height)]
    for column in range(width):
        before, after = schedules.position_at_sample(plan, end * column / (width - 1))
        curves = [(before, plan.schedule, "·" if remap else "•")]
        if after is not None and remap is not None:
            curves.append((after, remap.schedule, "•"))
        for position, schedule_, mark in curves:
            share = schedules.lr_at(schedule_, position) / plan.schedule.peak_lr
            lines[height - 1 - round(share * (height - 1))][column] = mark
    peak = f"{plan.schedule.peak_lr:.3g}"
    body = [f"{(peak if number == 0 else '0' if number == height - 1 else '').rjust(8)} ┤{''.join(line).rstrip()}"
            for number, line in enumerate(lines)]  # fmt: skip
    legend = "learning rate against samples" + ("" if remap is None else ": · before, • after")
    return [legend, *body, f"{'':8} └{'─' * width}", f"{'':10}0{f'{end:,.0f} samples'.rjust(width - 1)}"]
