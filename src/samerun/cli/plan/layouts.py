"""`samerun plan layouts`: what a device size and a global batch allow on a number of ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from samerun.cli.plan import output
from samerun.cli.plan.memory import add_model_options, add_training_options, request_of
from samerun.cli.plan.parser import WHOLE, Parser
from samerun.core.units import SizeBase
from samerun.errors import ExitCode
from samerun.plan.memory.layouts import LayoutsPlan, LayoutsRequest, plan_layouts
from samerun.plan.memory.request import Layout, Microbatch
from samerun.plan.record import to_json

_SHOWN: Final = 12


def layouts(arguments: Sequence[str]) -> ExitCode:
    """Lists layouts; ExitCode.NEGATIVE when none is left."""
    parser = Parser(
        name="layouts",
        summary="Every layout (D, TP, PP, ZeRO, micro, K) of --ranks devices that is not ruled out by memory.",
        examples=("--config config.json --seq 4096 --ranks 8 --global 64 --device 80GB --recompute full",),
        notes="Those that fit come first, then the least parallel, then the largest microbatch.",
    )
    add_model_options(parser)
    add_training_options(parser)
    parser.add_argument("--ranks", type=WHOLE, required=True, metavar="N", help="devices in all")
    parser.add_argument("--global", dest="total", type=WHOLE, required=True, metavar="B", help="samples per update")
    parser.add_argument("--max-tp", type=WHOLE, default=8, metavar="N", help="devices with fast links (default: 8)")
    parser.add_argument("--all", action="store_true", help=f"all layouts, not the first {_SHOWN}")
    options = parser.parse_args(arguments)
    memory = request_of(options, Layout(), Microbatch(sequence_length=options.seq))
    plan = plan_layouts(
        LayoutsRequest(memory=memory, num_ranks=options.ranks, global_batch=options.total, max_tensor=options.max_tp)
    )
    if options.json:
        output.print_json(to_json(plan))
    else:
        _print_layouts(plan, memory.device.base if memory.device else SizeBase.BINARY, show_all=options.all)
    return ExitCode.DONE if plan.choices else ExitCode.NEGATIVE


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
