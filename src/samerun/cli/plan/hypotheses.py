"""`samerun plan scaling` and `noise`: what to try with another batch, and how large a batch is still useful."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, Final

from samerun.cli.plan import output
from samerun.cli.plan.parser import COUNT, REAL, WHOLE, Parser
from samerun.errors import ExitCode, UsageError
from samerun.plan.noise import Measured, NoisePlan, plan_noise, steps_and_samples
from samerun.plan.record import to_json
from samerun.plan.scaling import Hyper, ScalingPlan, plan_scaling

_MEASURED: Final = tuple(field.name for field in fields(Measured))


def scaling(arguments: Sequence[str]) -> ExitCode:
    """The rules as arms of one comparison."""
    parser = Parser(
        name="scaling",
        summary="Learning-rate rules for another batch size, as hypotheses beside a fixed-LR baseline.",
        examples=(
            "--from 64 --to 256 --lr 3e-4 --betas 0.9 0.999 --eps 1e-8 --samples 1e6",
            "--from 256 --to 8192 --lr 0.1",
        ),
        notes="Without --betas the optimizer is SGD.",
    )
    add = parser.add_argument
    add("--from", dest="old", type=WHOLE, required=True, metavar="B", help="the batch that the values were tuned for")
    add("--to", dest="new", type=WHOLE, required=True, metavar="B", help="the new batch")
    add("--lr", type=REAL, required=True)
    add("--betas", type=REAL, nargs=2, metavar=("B1", "B2"))
    add("--eps", type=REAL, default=1e-8)
    add("--samples", type=COUNT, metavar="N", help="equal data for every arm")
    options = parser.parse_args(arguments)
    before = Hyper(lr=options.lr)
    if options.betas is not None:
        before = Hyper(lr=options.lr, beta1=options.betas[0], beta2=options.betas[1], eps=options.eps)
    plan = plan_scaling(before, options.old, options.new, num_samples=options.samples)
    if options.json:
        output.print_json(to_json(plan))
    else:
        _print_scaling(plan)
    return ExitCode.DONE


def noise(arguments: Sequence[str]) -> ExitCode:
    """The noise scale of a run's measurements."""
    parser = Parser(
        name="noise",
        summary="Gradient noise scale from squared gradient norms at two batch sizes, with its interval.",
        examples=("--small 4 --big 64 --norms 5.25 0.5625", "measurements.jsonl --small 16 --big 64", "runs/sft"),
        notes=(
            "A file has one JSON object a line with small_squared_norm and big_squared_norm, and small_batch and\n"
            "big_batch where windows differ; a directory is a run with noise_every=, whose journal has all four.\n"
            "Lines with updated=false are skipped windows and are left out; a window that was run again after a\n"
            "resume counts once."
        ),
    )
    add = parser.add_argument
    add("file", nargs="?", metavar="FILE", help="JSON lines, or a run's directory")
    add("--small", type=REAL, metavar="B", help="batch of the small norms (a microbatch, a replica), for all windows")
    add("--big", type=REAL, metavar="B", help="batch of the big norms (the window), for all windows")
    add("--norms", type=REAL, nargs=2, metavar=("SMALL", "BIG"), help="mean squared norms, instead of a file")
    options = parser.parse_args(arguments)
    if (options.file is None) == (options.norms is None):
        parser.error("give a file of measurements or --norms, one of the two")
    if options.norms is not None:
        windows = [Measured(small_squared_norm=options.norms[0], big_squared_norm=options.norms[1])]
    else:
        windows = read_measurements(Path(options.file))
    plan = plan_noise(windows, options.small, options.big)
    if options.json:
        output.print_json(to_json(plan))
    else:
        _print_noise(plan)
    return ExitCode.DONE


def read_measurements(path: Path) -> list[Measured]:
    """The measured windows of a file of JSON lines or of a run's journal, in order. Raises UsageError without any."""
    files = sorted((path / "journal").glob("*.jsonl")) if path.is_dir() else [path]
    found: dict[Any, Measured] = {}
    for file in files:
        for number, event in _events(file):
            values = {name: event[name] for name in _MEASURED if event.get(name) is not None}
            if not {"small_squared_norm", "big_squared_norm"} <= set(values) or event.get("updated") is False:
                continue
            wrong = [name for name, value in values.items() if not isinstance(value, (int, float))]
            if wrong:
                raise UsageError(f"{file}, line {number}: {wrong[0]} must be a number, got {values[wrong[0]]!r}")
            found[event.get("window", (str(file), number))] = Measured(**values)
    if not found:
        hint = "; a run measures with Run(…, noise_every=10)" if path.is_dir() else ""
        raise UsageError(f"{path} has no line with small_squared_norm and big_squared_norm{hint}")
    return list(found.values())


def _events(file: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise UsageError(f"{file} cannot be read ({error}); give JSON lines or a run's directory") from error
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            event = json.loads(line)
        except ValueError as error:
            raise UsageError(f"{file}, line {number}: not JSON ({error})") from error
        if isinstance(event, dict):
            yield number, event


def _print_scaling(plan: ScalingPlan) -> None:
    rows = []
    for candidate in plan.candidates:
        hyper = candidate.hyper
        if hyper is None:
            rows.append([candidate.name, "refused", "", "", ""])
        else:
            beta1, beta2, eps = (_say(value) for value in (hyper.beta1, hyper.beta2, hyper.eps))
            rows.append([candidate.name, f"{hyper.lr:.4g}", beta1, beta2, eps])
    output.print_line(f"batch {plan.old_batch} → {plan.new_batch}, κ = {plan.factor:g}")
    output.print_line()
    output.print_table(("hypothesis", "lr", "β1", "β2", "ε"), rows, right=(1, 2, 3, 4))
    output.print_line()
    for candidate in plan.candidates:
        output.print_wrapped(f"{candidate.name}: {candidate.why}", indent=2)
    output.print_line()
    data = "the same number of samples"
    if plan.num_samples is not None:
        data = f"{plan.num_samples:,} samples each ({plan.new_updates:,} updates instead of {plan.old_updates:,})"
    output.print_wrapped(
        f"To decide: run the arms from the same checkpoint and seed on {data}, with the old batch as reference; "
        "compare the validation loss at equal data, not at equal updates."
    )


def _say(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"


def _print_noise(plan: NoisePlan) -> None:
    scale = "not above zero" if plan.noise_scale is None else f"{plan.noise_scale:.4g}"
    interval = "not identifiable: measure longer" if plan.lower is None else f"{plan.lower:.4g} to {plan.upper:.4g}"
    if plan.num_windows == 1:
        interval = "none from one window"
    facts = [
        ("windows", str(plan.num_windows)),
        ("|G|²", f"{plan.squared_gradient:.4g}"),
        ("tr Σ", f"{plan.noise_trace:.4g}"),
        ("noise scale", f"{scale} (samples, or tokens if batches were given in tokens)"),
        ("95 % interval", interval),
    ]
    output.print_facts(facts)
    if plan.noise_scale is None or plan.noise_scale <= 0:
        return
    output.print_line()
    rows = []
    for batch in (plan.big_batch / 4, plan.big_batch / 2, plan.big_batch, plan.big_batch * 2, plan.big_batch * 4):
        steps, samples = steps_and_samples(batch, plan.noise_scale)
        rows.append([f"{batch:g}", f"{steps:.3g}", f"{samples:.3g}"])
    output.print_table(("batch", "updates / minimum", "samples / minimum"), rows, right=(0, 1, 2))
