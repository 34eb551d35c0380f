"""`samerun plan interval`, `goodput` and `preempt`: saving against failing, and the budget of a warning."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from samerun.cli.plan import output
from samerun.cli.plan.chart import interval_chart
from samerun.cli.plan.parser import FAILURES, REAL, SECONDS, WHOLE, Parser, kind
from samerun.core.units import format_seconds
from samerun.errors import ExitCode, UsageError
from samerun.plan.availability import deadline, mtbf
from samerun.plan.availability.goodput import GoodputPlan, GoodputRequest, Preemptions, plan_goodput
from samerun.plan.availability.interval import IntervalPlan, Saving, plan_interval
from samerun.plan.availability.simulation import Tier
from samerun.plan.record import to_json


def interval(arguments: Sequence[str]) -> ExitCode:
    """How often to save."""
    parser = Parser(
        name="interval",
        summary="The interval between saves that keeps most of the wall clock.",
        examples=(
            "--save 90s --mtbf 4h --restart 10min",
            "--save 1s --lag 8min --slowdown 0.05 --failures '3 in 100h'",
            "--save 4h --writers 64 --device-mtbf 1750d --devices 1024 --every 20min",
        ),
        notes="A blocking save has only --save. A background one blocks for --save and is durable after --lag.",
    )
    _add_saving(parser)
    _add_rate(parser)
    options = parser.parse_args(arguments)
    saving = Saving(
        blocked_seconds=options.save / options.writers,
        lag_seconds=options.lag,
        slowdown=options.slowdown,
        restart_seconds=options.restart,
        num_in_flight=options.in_flight,
    )
    plan = plan_interval(saving, _rate(options), interval_seconds=options.every, num_simulated=options.simulate)
    if options.json:
        output.print_json(to_json(plan))
    else:
        _print_interval(plan)
    return ExitCode.DONE


def goodput(arguments: Sequence[str]) -> ExitCode:
    """Where the wall clock goes."""
    parser = Parser(
        name="goodput",
        summary="How much of the wall clock is kept work, for one way of saving; with a near tier if you have one.",
        examples=(
            "--every 20min --save 90s --mtbf 4h --restart 10min",
            "--every 30min --lag 5min --restart 10min --near-every 2min --near-lag 6s --near-restart 2min "
            "--near-share 0.75 --save 1s --mtbf 185min",
        ),
    )
    _add_saving(parser)
    _add_rate(parser)
    _add_goodput(parser)
    options = parser.parse_args(arguments)
    if options.every is None:
        parser.error("--every is missing (seconds of work between durable saves)")
    plan = plan_goodput(_goodput_request(options), num_simulated=options.simulate)
    if options.json:
        output.print_json(to_json(plan))
    else:
        _print_goodput(plan)
    return ExitCode.DONE


def preempt(arguments: Sequence[str]) -> ExitCode:
    """Does a save fit into the warning?"""
    known = ", ".join(f"{name} {seconds:g} s" for name, seconds in deadline.KNOWN_LINKS.items())
    parser = Parser(
        name="preempt",
        summary="Whether the path from a warning to a durable checkpoint fits before the kill; the limiting link.",
        examples=(
            "--chain aws-spot --chain kubernetes=120s --chain torchrun --window 12s --save 20s --margin 5s",
            "--chain kubernetes=90s --window 10s --save 90s",
        ),
        notes=f"Known links and their defaults: {known}.",
    )
    add = parser.add_argument
    add("--chain", action="append", type=kind(deadline.link), default=[], metavar="LINK", help="NAME or NAME=TIME")
    add("--window", type=SECONDS, required=True, metavar="TIME", help="longest window or other span without an edge")
    add("--save", type=SECONDS, required=True, metavar="TIME", help="until the checkpoint is durable, at the slow end")
    add("--notice", type=SECONDS, default=1.0, metavar="TIME", help="until all ranks know (default: 1s)")
    add("--teardown", type=SECONDS, default=0.0, metavar="TIME", help="process group, workers")
    add("--margin", type=SECONDS, default=0.0, metavar="TIME", help="network and disk jitter")
    options = parser.parse_args(arguments)
    path = deadline.Path(
        window_seconds=options.window, save_seconds=options.save, notice_seconds=options.notice,
        teardown_seconds=options.teardown, margin_seconds=options.margin,
    )  # fmt: skip
    plan = deadline.plan_preempt(tuple(options.chain), path)
    if options.json:
        output.print_json(to_json(plan))
    else:
        _print_preempt(plan)
    return ExitCode.NEGATIVE if plan.verdict is deadline.Outcome.DOES_NOT_FIT else ExitCode.DONE


def _add_saving(parser: Parser) -> None:
    add = parser.add_argument_group("saving").add_argument
    add("--save", type=SECONDS, required=True, metavar="TIME", help="training blocked by one save")
    add("--writers", type=WHOLE, default=1, metavar="N", help="--save is for one writer; N share it")
    add("--lag", type=SECONDS, default=0.0, metavar="TIME", help="from staged to durable (background saves)")
    add("--slowdown", type=REAL, default=0.0, metavar="SHARE", help="speed lost while uploading, 0 to 1")
    add("--in-flight", type=WHOLE, default=1, metavar="N", help="background saves at once")
    add("--restart", type=SECONDS, default=0.0, metavar="TIME", help="from a failure to new work")
    add("--every", type=SECONDS, metavar="TIME", help="work between saves")


def _add_rate(parser: Parser) -> None:
    add = parser.add_argument_group("failures, one of").add_argument
    add("--mtbf", type=SECONDS, metavar="TIME", help="mean time between interruptions of the job")
    add("--failures", type=FAILURES, metavar="'K in TIME'", help="counted: gives an interval too")
    add("--device-mtbf", type=SECONDS, metavar="TIME", help="of one device; rates add over --devices")
    add("--devices", type=WHOLE, metavar="N")
    add("--simulate", type=WHOLE, default=4000, metavar="N", help="failures to live through (default: 4000)")


def _add_goodput(parser: Parser) -> None:
    add = parser.add_argument_group("near tier, preemptions, queue").add_argument
    add("--near-every", type=SECONDS, metavar="TIME", help="work between saves to the near tier")
    add("--near-lag", type=SECONDS, default=0.0, metavar="TIME")
    add("--near-restart", type=SECONDS, default=0.0, metavar="TIME")
    add("--near-share", type=REAL, default=0.0, metavar="SHARE", help="failures that leave it readable")
    add("--preempted-every", type=SECONDS, metavar="TIME", help="mean time between noticed preemptions")
    add("--saved-in-time", type=REAL, default=1.0, metavar="SHARE", help="of those, saved before the kill")
    add("--queue", type=SECONDS, default=0.0, metavar="TIME", help="waiting for machines each time")
    add("--weibull", type=REAL, default=1.0, metavar="SHAPE", help="below 1: failures in bursts (simulation)")


def _rate(options: argparse.Namespace) -> mtbf.FailureRate:
    ways = [options.mtbf is not None, options.failures is not None, options.device_mtbf is not None]
    if sum(ways) != 1:
        raise UsageError(
            "give the failures one way: --mtbf 4h, or --failures '3 in 100h', or --device-mtbf with --devices"
        )
    if options.mtbf is not None:
        return mtbf.stated_rate(options.mtbf)
    if options.failures is not None:
        return mtbf.rate_from_failures(*options.failures)
    if options.devices is None:
        raise UsageError("--device-mtbf needs --devices: write it like --device-mtbf 1750d --devices 1024")
    return mtbf.rate_of_devices(options.device_mtbf, options.devices)


def _goodput_request(options: argparse.Namespace) -> GoodputRequest:
    near = None
    if options.near_every is not None:
        near = Tier(
            interval_seconds=options.near_every,
            lag_seconds=options.near_lag,
            restart_seconds=options.near_restart,
        )
    preemptions = None
    if options.preempted_every is not None:
        preemptions = Preemptions(mean_seconds=options.preempted_every, success=options.saved_in_time)
    return GoodputRequest(
        rate=_rate(options),
        durable=Tier(interval_seconds=options.every, lag_seconds=options.lag, restart_seconds=options.restart),
        blocked_seconds=options.save / options.writers,
        slowdown=options.slowdown,
        near=near,
        near_share=options.near_share,
        preemptions=preemptions,
        queue_seconds=options.queue,
        weibull_shape=options.weibull,
    )


def _say_rate(rate: mtbf.FailureRate) -> str:
    said = format_seconds(rate.mtbf_seconds)
    if rate.lower_seconds is None:
        return said
    upper = "no upper end" if rate.upper_seconds is None else format_seconds(rate.upper_seconds)
    return f"{said} (95 %: {format_seconds(rate.lower_seconds)} to {upper}, from {rate.num_failures} failures)"


def _formulas(plan: IntervalPlan) -> tuple[tuple[str, float], ...]:
    return ("Young", plan.young_seconds), ("Daly", plan.daly_seconds), ("exact", plan.exact_seconds)


def _print_interval(plan: IntervalPlan) -> None:
    say = format_seconds
    chosen, lived = plan.chosen, plan.simulated
    by_formula = ((name, say(value)) for name, value in _formulas(plan))
    output.print_facts([
        ("one save", f"blocks {say(plan.saving.blocked_seconds)}, durable {say(plan.saving.lag_seconds)} later"),
        ("interruptions", _say_rate(plan.rate)),
        ("best interval", f"{say(round(plan.optimum_seconds, 1))} of work between saves"),
        ("by formula", ", ".join(f"{name} {value}" for name, value in by_formula)),
    ])  # fmt: skip
    if plan.optimum_at_lower_mtbf_seconds is not None:
        upper = plan.optimum_at_upper_mtbf_seconds
        ends = f"{say(plan.optimum_at_lower_mtbf_seconds)} to {'no upper end' if upper is None else say(upper)}"
        output.print_facts([("over the 95 %", ends)])
    output.print_line()
    first = "out of range" if plan.first_order_ettr is None else f"{plan.first_order_ettr:.1%}"
    output.print_line(f"saving every {say(round(chosen.interval_seconds, 1))}:")
    output.print_facts([
        ("spent saving", f"{chosen.overhead:.1%} of the wall clock while nothing fails"),
        ("a failure loses", f"{say(plan.mean_loss_seconds)} on average, {say(plan.largest_loss_seconds)} at most"),
        ("kept", f"{chosen.ettr:.1%} exact, {first} first order, "
                 f"{lived.ettr:.1%} ± {lived.standard_error:.1%} simulated over {lived.num_failures} failures"),
        ("against the best", f"{(plan.best.ettr - chosen.ettr) * 100:.1f} points below {plan.best.ettr:.1%}"),
    ])  # fmt: skip
    output.print_line()
    for line in interval_chart(plan.curve, plan.best):
        output.print_line(line)
    for warning in plan.warnings:
        output.print_note(f"warning: {warning}")


def _print_goodput(plan: GoodputPlan) -> None:
    shares, lived = plan.shares, plan.simulated
    output.print_facts([
        ("interruptions", _say_rate(plan.request.rate)),
        ("a failure loses", f"{format_seconds(plan.loss_seconds)} on average"),
        ("kept (ETTR)", ("out of range" if plan.ettr is None else f"{plan.ettr:.1%}") + " first order, "
                        f"{lived.ettr:.1%} ± {lived.standard_error:.1%} simulated over {lived.num_failures} failures"),
        ("goodput", f"{plan.goodput:.1%} with {format_seconds(plan.request.queue_seconds)} of queue an interruption"),
    ])  # fmt: skip
    output.print_line()
    rows = [
        (name, f"{share:.2%}", "█" * round(50 * share))
        for name, share in (
            ("kept", shares.kept),
            ("done twice", shares.redone),
            ("blocked by saves", shares.blocked),
            ("slowed by uploads", shares.slowed),
            ("restarting", shares.restart),
        )
    ]
    output.print_table(("wall clock without queue", "share", ""), rows, right=(1,))
    for warning in plan.warnings:
        output.print_note(f"warning: {warning}")


def _print_preempt(plan: deadline.PreemptPlan) -> None:
    say = format_seconds
    rows = [(each.name, say(each.warning_seconds), "← limits" if each.name == plan.limiting_link else "")
            for each in plan.links]  # fmt: skip
    output.print_table(("kill chain", "warning", ""), rows, right=(1,))
    output.print_line()
    path = plan.path
    steps = [
        ("notice", path.notice_seconds),
        ("finish the window", path.window_seconds),
        ("save until durable", path.save_seconds),
        ("tear down", path.teardown_seconds),
        ("margin", path.margin_seconds),
        ("TOTAL", path.total_seconds),
    ]
    output.print_table(("after the warning", "time"), [(name, say(seconds)) for name, seconds in steps], right=(1,))
    output.print_line()
    if plan.verdict is deadline.Outcome.FITS:
        output.print_wrapped(
            f"verdict: fits, {say(plan.spare_seconds)} to spare. Feasible at these estimates; no guarantee."
        )
        return
    if plan.verdict is deadline.Outcome.DROP_WINDOW:
        text = f"finish the window is short by {say(plan.short_seconds)}; saving the last edge without it fits"
    else:
        text = f"even without the open window {say(path.without_window_seconds)} exceed {say(plan.warning_seconds)}"
    output.print_wrapped(f"verdict: {plan.verdict.value}: {text}. {plan.limiting_link} limits: {plan.remedy}.")
