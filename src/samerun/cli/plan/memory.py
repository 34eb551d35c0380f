"""`samerun plan memory`: bounds on one rank's peak memory, a verdict, and what to change."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from typing import Any, Final

from samerun.cli.plan import output
from samerun.cli.plan.parser import COUNT, SIZE, WHOLE, Parser, member, values
from samerun.core.units import SizeBase
from samerun.errors import ExitCode, UsageError
from samerun.plan.memory import request as asked
from samerun.plan.memory.plan import MemoryPlan, Verdict, plan_memory
from samerun.plan.memory.suggest import suggest
from samerun.plan.memory.term import engineering
from samerun.plan.mesh import Mesh
from samerun.plan.model.shape import Family, Shape
from samerun.plan.record import to_json, tree

_EXAMPLES: Final = (
    "--params 70e9 --method qlora --device 24GiB",
    "--config config.json --seq 4096 --ranks 8 --zero 3 --recompute full --device 80GB",
    "--layers 32 --hidden 4096 --heads 32 --kv-heads 8 --ffn 14336 --vocab 128256 --seq 8192 --device 80GiB",
)
_SHAPE: Final = "--layers 32 --hidden 4096 --heads 32 --kv-heads 8 --ffn 14336 --vocab 128256"


def memory(arguments: Sequence[str]) -> ExitCode:
    """Parses, plans, prints; ExitCode.NEGATIVE when the plan does not fit."""
    parser = Parser(
        name="memory",
        summary="Bounds on the peak memory of one rank, term by term, and whether it fits a device.",
        examples=_EXAMPLES,
        notes="Without a shape and --seq, activations are unknown and only a lower bound is given.",
    )
    add_model_options(parser)
    add_training_options(parser)
    _add_layout_options(parser)
    options = parser.parse_args(arguments)
    plan = plan_memory(_request(options))
    if options.json:
        output.print_json(to_json(plan) | {"suggestions": [tree(item) for item in suggest(plan)]})
    else:
        _print_plan(plan)
    return ExitCode.NEGATIVE if plan.verdict is Verdict.DOES_NOT_FIT else ExitCode.DONE


def add_model_options(parser: Parser) -> None:
    """--params, --config, or a shape by hand."""
    group = parser.add_argument_group("the model")
    group.add_argument("--params", type=COUNT, metavar="N", help="parameters: 70e9 or 70B")
    group.add_argument("--config", metavar="FILE", help="a Hugging Face config.json")
    group.add_argument("--ignore", action="append", default=[], metavar="FIELD", help="a config field without effect")
    group.add_argument("--layers", type=WHOLE, metavar="L")
    group.add_argument("--hidden", type=WHOLE, metavar="H")
    group.add_argument("--heads", type=WHOLE, metavar="A")
    group.add_argument("--kv-heads", type=WHOLE, metavar="A", help="default: as --heads")
    group.add_argument("--ffn", type=WHOLE, metavar="F", help="default: 4 × hidden")
    group.add_argument("--vocab", type=WHOLE, metavar="V")
    group.add_argument("--family", type=member(Family), default=Family.LLAMA, help=f"{values(Family)} (default: llama)")


def add_training_options(parser: Parser) -> None:
    """How it is trained: method, precision, optimizer, activations, saving."""
    group = parser.add_argument_group("the training")
    group.add_argument("--method", type=member(asked.Method), default=asked.Method.FULL, help=values(asked.Method))
    precisions = values(asked.Precision)
    group.add_argument(
        "--precision", type=member(asked.Precision), default=asked.Precision.BF16,
        help=f"{precisions}; bf16 (default) and fp16 are autocast over fp32 weights",
    )  # fmt: skip
    group.add_argument(
        "--optimizer", type=member(asked.Optimizer), default=asked.Optimizer.ADAMW, help=values(asked.Optimizer)
    )
    group.add_argument(
        "--quant", type=member(asked.Quantization), default=asked.Quantization.IDEAL_4BIT,
        help=f"base of QLoRA: {values(asked.Quantization)}; 4bit is the ideal, without constants",
    )  # fmt: skip
    group.add_argument("--rank", type=WHOLE, default=16, metavar="R", help="adapter rank (default: 16)")
    group.add_argument("--adapters", choices=("all", "attention"), default="all", help="which linear layers have one")
    group.add_argument(
        "--attention", type=member(asked.Attention), default=asked.Attention.FLASH,
        help="flash (any fused kernel, default) or math (keeps s² scores)",
    )  # fmt: skip
    group.add_argument("--recompute", default="none", help="none, selective, full, every-K (as every-4), sqrt")
    group.add_argument("--loss", type=member(asked.Loss), default=asked.Loss.EAGER, help=values(asked.Loss))
    group.add_argument("--save", type=member(asked.Save), default=asked.Save.ASYNC, help=values(asked.Save))
    group.add_argument("--device", type=SIZE, metavar="SIZE", help="what one device offers: 24GiB or 80GB")
    group.add_argument(
        "--reserve", type=SIZE, default="2GiB", metavar="SIZE", help="for context, buffers, fragmentation (2GiB)"
    )
    group.add_argument("--seq", type=WHOLE, default=0, metavar="S", help="sequence length in tokens")


def _add_layout_options(parser: Parser) -> None:
    group = parser.add_argument_group("the layout")
    group.add_argument("--ranks", type=WHOLE, default=1, metavar="N", help="devices in all")
    group.add_argument("--tp", type=WHOLE, default=1, metavar="N", help="tensor-parallel ranks")
    group.add_argument("--pp", type=WHOLE, default=1, metavar="N", help="pipeline stages")
    group.add_argument("--cp", type=WHOLE, default=1, metavar="N", help="context-parallel ranks")
    group.add_argument("--sp", action="store_true", help="sequence parallelism over the tensor ranks")
    group.add_argument("--interleave", type=WHOLE, default=1, metavar="V", help="virtual stages per pipeline rank")
    group.add_argument("--zero", type=int, default=0, metavar="STAGE", help="ZeRO stage 0 to 3; 3 is FSDP")
    group.add_argument("--unsharded-grads", action="store_true", help="FSDP: one reduction per window")
    group.add_argument("--micro", type=WHOLE, default=1, metavar="B", help="sequences in a microbatch")
    group.add_argument("--accumulate", type=WHOLE, default=1, metavar="K", help="microbatches in a window, per rank")


def _request(options: argparse.Namespace) -> asked.MemoryRequest:
    mesh = Mesh(num_ranks=options.ranks, num_tensor=options.tp, num_pipeline=options.pp, num_context=options.cp)
    layout = asked.Layout(
        mesh=mesh,
        zero_stage=options.zero,
        is_sequence_parallel=options.sp,
        num_interleaved=options.interleave,
        is_unsharded_accumulation=options.unsharded_grads,
    )
    batch = asked.Microbatch(
        num_sequences=options.micro, sequence_length=options.seq, num_accumulated=options.accumulate
    )
    return request_of(options, layout, batch, shape_of(options))


def request_of(
    options: argparse.Namespace, layout: asked.Layout, batch: asked.Microbatch, shape: Shape | None
) -> asked.MemoryRequest:
    """The request that the training options describe, for a model on a layout."""
    mode, segment = _recompute(options.recompute)
    return asked.MemoryRequest(
        num_params=options.params,
        shape=shape,
        method=options.method,
        precision=options.precision,
        optimizer=options.optimizer,
        quantization=options.quant,
        adapter=asked.Adapter(rank=options.rank, is_attention_only=options.adapters == "attention"),
        layout=layout,
        batch=batch,
        activations=asked.Activations(
            attention=options.attention, recompute=mode, segment_layers=segment, loss=options.loss
        ),
        save=options.save,
        device=options.device,
        reserve_bytes=options.reserve.num_bytes,
    )


def _recompute(text: str) -> tuple[asked.Recompute, int]:
    found = re.fullmatch(r"every-(\d+)", text)
    if found:
        return asked.Recompute.EVERY_K, int(found.group(1))
    for mode in asked.Recompute:
        if mode.value == text and mode is not asked.Recompute.EVERY_K:
            return mode, 4
    raise UsageError(f"--recompute {text!r} is unknown; write one of: none, selective, full, every-4, sqrt")


def shape_of(options: argparse.Namespace) -> Shape | None:
    """The shape that --config or --layers and its like give; None when neither is there."""
    by_hand = [name for name in ("layers", "hidden", "heads", "kv_heads", "ffn", "vocab") if getattr(options, name)]
    if options.config is not None:
        from samerun.plan.model.hf_config import read_config  # reads json and paths: only when asked

        if by_hand:
            raise UsageError(f"--config and --{by_hand[0].replace('_', '-')} both describe the shape; give one of them")
        return read_config(options.config, ignore=options.ignore)
    if not by_hand:
        return None
    missing = [f"--{name}" for name in ("layers", "hidden", "heads", "vocab") if getattr(options, name) is None]
    if missing:
        raise UsageError(f"the shape lacks {' '.join(missing)}; write it like {_SHAPE}")
    return _shape_by_hand(options)


def _shape_by_hand(options: argparse.Namespace) -> Shape:
    if options.hidden % options.heads:
        raise UsageError(f"--heads {options.heads} does not divide --hidden {options.hidden}; write it like {_SHAPE}")
    is_gpt = options.family is Family.GPT
    return Shape(
        family=options.family,
        num_layers=options.layers,
        hidden_size=options.hidden,
        num_heads=options.heads,
        num_kv_heads=options.kv_heads or options.heads,
        head_size=options.hidden // options.heads,
        ffn_size=options.ffn or 4 * options.hidden,
        vocab_size=options.vocab,
        max_positions=options.seq if is_gpt else 0,
        is_tied=options.family is not Family.LLAMA,
    )


def _print_plan(plan: MemoryPlan) -> None:
    request = plan.request
    base = SizeBase.BINARY if request.device is None else request.device.base
    output.print_line(_headline(plan, base))
    output.print_line()
    sources: list[str] = []
    rows = [_row(term, sources, base) for term in plan.terms]
    peak = f"PEAK ({plan.lower_phase.value} / {plan.upper_phase.value})"
    bounds = [output.say_bytes(plan.lower_bytes, base), output.say_bytes(plan.upper_bytes, base)]
    rows.append([peak, *bounds, "", "maximum over the phases, not a sum"])
    output.print_table(("per rank", "at least", "at most", "", "formula"), rows, right=(1, 2))
    output.print_line()
    output.print_table(
        ("host memory per rank", "at least", "at most", "", "formula"),
        [_row(term, sources, base) for term in plan.host_terms],
        right=(1, 2),
    )
    output.print_line()
    for number, source in enumerate(sources, 1):
        output.print_line(f"  [{number}] {source}")
    _print_verdict(plan, base)


def _row(term: Any, sources: list[str], base: SizeBase) -> list[str]:
    if term.source not in sources:
        sources.append(term.source)
    formula = f"{term.formula} [{sources.index(term.source) + 1}]"
    return [term.name, output.say_bytes(term.lower_bytes, base), output.say_bytes(term.upper_bytes, base),
            term.tag.value, formula]  # fmt: skip


def _headline(plan: MemoryPlan, base: SizeBase) -> str:
    request = plan.request
    stage = "" if plan.stage == "only" else f", {plan.stage} pipeline stage"
    zero = f", ZeRO-{request.layout.zero_stage}" if request.layout.zero_stage else ""
    device = "" if request.device is None else f", device {output.say_bytes(request.device.num_bytes, base)}"
    return (
        f"{engineering(request.num_base_params)} parameters, {request.method.value}, {request.precision.value}, "
        f"{request.optimizer.value}, {request.layout.mesh}{zero}{stage}{device}"
    )


def _print_verdict(plan: MemoryPlan, base: SizeBase) -> None:
    if plan.verdict is None:
        return
    output.print_line()
    output.print_wrapped(f"verdict: {plan.verdict.value}. {verdict_reason(plan, base)}")
    found = suggest(plan)
    if found:
        output.print_line()
        rows = [
            [item.option, output.say_bytes(item.lower_bytes, base), output.say_bytes(item.upper_bytes, base),
             item.verdict.value, item.cost] for item in found
        ]  # fmt: skip
        output.print_table(("change, cheapest first", "at least", "at most", "verdict", "costs"), rows, right=(1, 2))
    if plan.verdict is Verdict.DOES_NOT_FIT:
        output.print_line()
        output.print_wrapped(_otherwise(plan))


def _otherwise(plan: MemoryPlan) -> str:
    """What no option of this command says: another model, another machine."""
    assert plan.request.device is not None
    smaller = "a smaller model"
    if plan.request.shape is None:  # without a shape every certain byte is proportional to the parameters
        most = plan.request.num_base_params * plan.request.device.num_bytes / plan.lower_bytes
        smaller += f" (below {engineering(most)} parameters, for these terms alone)"
    return f"Otherwise: {smaller}, a lower-bit base, or offloading to host memory."


def verdict_reason(plan: MemoryPlan, base: SizeBase) -> str:
    """One sentence: what is short, what is left and for which terms."""
    say = output.say_bytes
    assert plan.request.device is not None
    device = say(plan.request.device.num_bytes, base)
    if plan.verdict is Verdict.DOES_NOT_FIT:
        alone = plan.terms[0]
        if alone.lower_bytes > plan.request.device.num_bytes:
            short = alone.lower_bytes - plan.request.device.num_bytes
            return (
                f"The {alone.name} alone, {say(alone.lower_bytes, base)}, exceed {device}: short by {say(short, base)}."
            )
        return f"At least {say(plan.lower_bytes, base)} of {device}: short by {say(plan.short_bytes, base)}."
    if plan.verdict is Verdict.FITS:
        spare = plan.request.device.num_bytes - (plan.upper_bytes or 0)
        return f"At most {say(plan.upper_bytes, base)} of {device}: {say(spare, base)} to spare."
    left = f"{say(plan.left_bytes, base)} of {device} are left beyond what is certain"
    if plan.unknown_terms:
        return f"{left}; they must hold: {', '.join(term.name for term in _uncertain(plan))}."
    return f"{left}; the upper bound, {say(plan.upper_bytes, base)}, is above the device. Measure, or change the plan."


def _uncertain(plan: MemoryPlan) -> list[Any]:
    return [term for term in plan.terms if term.upper_bytes is None or term.lower_bytes == 0]
