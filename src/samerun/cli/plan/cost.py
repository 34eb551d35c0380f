"""`samerun plan cost` and `recipe`: FLOPs, days and money; which choices go together."""

from __future__ import annotations

from collections.abc import Sequence

from samerun.cli.plan import output
from samerun.cli.plan.parser import COUNT, REAL, WHOLE, Parser, member, values
from samerun.core.units import format_seconds
from samerun.errors import ExitCode, UsageError
from samerun.plan import recipe as recipes
from samerun.plan.cost import KNOWN_DEVICES, CostPlan, CostRequest, Recomputing, plan_cost
from samerun.plan.record import to_json


def cost(arguments: Sequence[str]) -> ExitCode:
    """C = 6ND, in days and money."""
    known = ", ".join(f"{name} {peak / 1e12:g}" for name, peak in KNOWN_DEVICES.items())
    parser = Parser(
        name="cost",
        summary="Compute C = 6·parameters·tokens, and what it takes in days and money.",
        examples=(
            "--params 125e6 --tokens 2.5e9 --device a100 --mfu 0.4 --price 2.00",
            "--params 174.6e9 --tokens 300e9 --device a100 --devices 1024 --mfu 0.45 --recompute full",
        ),
        notes=f"Known devices, dense 16-bit TFLOP/s: {known}.",
    )
    add = parser.add_argument
    add("--params", type=COUNT, required=True, metavar="N")
    add("--tokens", type=COUNT, required=True, metavar="D")
    add("--devices", type=WHOLE, default=1, metavar="N")
    add("--device", metavar="NAME", help="a known device (default: a100)")
    add("--peak", type=REAL, metavar="FLOPS", help="FLOP/s of one device, instead of --device")
    add("--mfu", type=REAL, default=0.4, metavar="SHARE", help="model FLOPs utilization (default: 0.4, measure yours)")
    add("--recompute", type=member(Recomputing), default=Recomputing.NONE, help=values(Recomputing))
    add("--goodput", type=REAL, default=1.0, metavar="SHARE", help="kept share of the wall clock, see plan goodput")
    add("--price", type=REAL, metavar="MONEY", help="of one device hour")
    options = parser.parse_args(arguments)
    plan = plan_cost(
        CostRequest(
            num_params=options.params,
            num_tokens=options.tokens,
            num_devices=options.devices,
            peak_flops_per_second=_peak(options.device, options.peak),
            utilization=options.mfu,
            recomputing=options.recompute,
            price_per_device_hour=options.price,
            goodput=options.goodput,
        )
    )
    if options.json:
        output.print_json(to_json(plan))
    else:
        _print_cost(plan)
    return ExitCode.DONE


def recipe(arguments: Sequence[str]) -> ExitCode:
    """Judges a combination of choices; ExitCode.NEGATIVE when it is impossible."""
    parser = Parser(
        name="recipe",
        summary="Objective, trainable weights, precision and distillation: do they go together?",
        examples=(
            "--objective sft --trainable adapters --base nf4 --compute bf16",
            "--objective sft --trainable all --base nf4",
        ),
    )
    default = recipes.Recipe()
    for name, of in _CHOICES.items():
        parser.add_argument(f"--{name}", type=member(of), default=getattr(default, name), help=values(of))
    options = parser.parse_args(arguments)
    plan = recipes.plan_recipe(recipes.Recipe(**{name: getattr(options, name) for name in _CHOICES}))
    if options.json:
        output.print_json(to_json(plan))
    else:
        _print_recipe(plan)
    return ExitCode.NEGATIVE if plan.verdict is recipes.RecipeVerdict.IMPOSSIBLE else ExitCode.DONE


_CHOICES = {
    "objective": recipes.Objective,
    "trainable": recipes.Trainable,
    "base": recipes.Base,
    "compute": recipes.Compute,
    "distillation": recipes.Distillation,
    "teacher": recipes.Teacher,
    "device": recipes.Device,
    "sharding": recipes.Sharding,
}


def _peak(device: str | None, peak: float | None) -> float:
    if device is not None and peak is not None:
        raise UsageError("--device and --peak both say how fast a device is; give one of them")
    if peak is not None:
        return peak
    name = (device or "a100").lower()
    if name not in KNOWN_DEVICES:
        raise UsageError(f"--device {device!r} is unknown; one of: {', '.join(KNOWN_DEVICES)}, or --peak 312e12")
    return KNOWN_DEVICES[name]


def _print_cost(plan: CostPlan) -> None:
    facts = [
        ("model FLOPs", f"{plan.model_flops:.4g} (6·N·D)"),
        ("with recomputation", f"{plan.hardware_flops:.4g}"),
        ("tokens a parameter", f"{plan.tokens_per_param:.3g} (about 20 is compute-optimal)"),
        ("tokens a second", f"{plan.tokens_per_second:,.0f}"),
        ("wall clock", format_seconds(plan.seconds)),
        ("device hours", f"{plan.device_hours:,.4g}"),
    ]
    if plan.price is not None:
        facts.append(("money", f"{plan.price:,.2f}"))
    output.print_facts(facts)


def _print_recipe(plan: recipes.RecipePlan) -> None:
    chosen = plan.recipe
    teacher = f", teacher {chosen.teacher.value}" if chosen.teacher else ""
    output.print_line(
        f"{chosen.objective.value}, training {chosen.trainable.value}, base {chosen.base.value}, compute "
        f"{chosen.compute.value}, distillation {chosen.distillation.value}{teacher}, {chosen.device.value}"
    )
    output.print_line()
    for finding in plan.findings:
        output.print_wrapped(f"{finding.severity.value} ({finding.name}): {finding.reason}.", indent=2)
        output.print_wrapped(f"instead: {finding.instead}", indent=6)
    if plan.findings:
        output.print_line()
    output.print_line(f"verdict: {plan.verdict.value}" + ("" if plan.findings else "; no rule speaks against it"))
