"""`samerun plan layouts`: what a device size and a global batch allow on a number of ranks."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from samerun.cli.plan import output
from samerun.cli.plan.memory import add_model_options, add_training_options, request_of, shape_of
from samerun.cli.plan.parser import WHOLE, Parser
from samerun.core.units import SizeBase
from samerun.errors import ExitCode
from samerun.plan.memory.layouts import LayoutsPlan, LayoutsRequest, plan_layouts
from samerun.plan.memory.request import Layout, Microbatch
from samerun.plan.memory.term import engineering
from samerun.plan.model.shape import Shape, check_params
from samerun.plan.model.tensor_shapes import num_elements, shape_of_tensors
from samerun.plan.record import to_json

if TYPE_CHECKING:
    from samerun.cli.plan.checkpoint import SavedModel

_SHOWN: Final = 12


def layouts(arguments: Sequence[str]) -> ExitCode:
    """Lists layouts; ExitCode.NEGATIVE when none is left."""
    parser = Parser(
        name="layouts",
        summary="Every layout (D, TP, PP, ZeRO, micro, K) of --ranks devices that is not ruled out by memory.",
        examples=(
            "--config config.json --seq 4096 --ranks 8 --global 64 --device 80GB --recompute full",
            "--checkpoint runs/policy-sft --heads 32 --seq 4096 --ranks 5 --device 80GiB",
        ),
        notes=(
            "Those that fit come first, then the least parallel, then the largest microbatch. A checkpoint gives the\n"
            "shape (but for the heads, which no tensor shows), and by default its ranks and global batch."
        ),
    )
    add_model_options(parser)
    add_training_options(parser)
    parser.add_argument("--checkpoint", metavar="RUN", help="RUN, RUN@NAME, or the directory of one checkpoint")
    parser.add_argument("--ranks", type=WHOLE, metavar="N", help="devices in all")
    parser.add_argument("--global", dest="total", type=WHOLE, metavar="B", help="samples per update")
    parser.add_argument("--max-tp", type=WHOLE, default=8, metavar="N", help="devices with fast links (default: 8)")
    parser.add_argument("--all", action="store_true", help=f"all layouts, not the first {_SHOWN}")
    options = parser.parse_args(arguments)
    saved = _saved(options)
    shape = shape_of(options) if saved is None else _shape_of_saved(options, saved)
    request = LayoutsRequest(
        memory=request_of(options, Layout(), Microbatch(sequence_length=options.seq), shape),
        num_ranks=options.ranks or (saved.num_ranks if saved is not None else parser.error("--ranks is missing")),
        global_batch=_global_batch(parser, options, saved),
        max_tensor=options.max_tp,
    )
    plan = plan_layouts(request)
    if options.json:
        output.print_json(to_json(plan) | ({} if saved is None else {"checkpoint": saved.to_json()}))
    else:
        if saved is not None:
            output.print_line(f"{saved}; {engineering(num_elements(saved.tensors))} parameters\n")
        device = request.memory.device
        _print_layouts(plan, device.base if device else SizeBase.BINARY, show_all=options.all)
    return ExitCode.DONE if plan.choices else ExitCode.NEGATIVE


def _saved(options: argparse.Namespace) -> SavedModel | None:
    if options.checkpoint is None:
        return None
    from samerun.cli.plan.checkpoint import read_saved  # reads the format's records: only when asked

    return read_saved(options.checkpoint)


def _shape_of_saved(options: argparse.Namespace, saved: SavedModel) -> Shape:
    """From the weights, unless --config or --layers describe them: then the weights must have as many parameters."""
    if options.config is None and options.layers is None:
        where = f"{saved.where}@{saved.name}"
        return shape_of_tensors(saved.tensors, num_heads=options.heads, family=options.family, where=where)
    shape = shape_of(options)
    assert shape is not None
    check_params(shape, num_elements(saved.tensors), given="--checkpoint")
    return shape


def _global_batch(parser: Parser, options: argparse.Namespace, saved: SavedModel | None) -> int:
    found = options.total or (saved.global_batch if saved is not None else None)
    if found is None:
        parser.error("--global is missing" + ("" if saved is None else f", and {saved.where} does not say it"))
    return int(found)


def _print_layouts(plan: LayoutsPlan, base: SizeBase, *, show_all: bool) -> None:
    shown = plan.choices if show_all else plan.choices[:_SHOWN]
    rows = [
        [str(each.num_replicas), str(each.num_tensor), str(each.num_pipeline), str(each.zero_stage),
         str(each.micro_batch), str(each.num_accumulated), output.say_bytes(each.lower_bytes, base),
         output.say_bytes(each.upper_bytes, base), each.verdict.value]
        for each in shown
    ]  # fmt: skip
    header = ("D", "TP", "PP", "ZeRO", "micro", "K", "at least", "at most", "verdict")
    if rows:
        output.print_table(header, rows, right=tuple(range(8)))
    rest = len(plan.choices) - len(shown)
    more = f"{rest} more with --all; " if rest else ""
    output.print_line(f"\n{more}{plan.num_ruled_out} layouts of {plan.num_ranks} ranks do not fit.")
