"""Every command: a document, an example in its help, refusals with exit code 2, and a quick start."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from samerun.cli import main as entry
from samerun.cli.plan import COMMANDS, app, main
from samerun.errors import UsageError

SHAPE = "--layers 4 --hidden 64 --heads 4 --vocab 100 --seq 32"
EXAMPLES = {
    "memory": f"{SHAPE} --device 1GiB",
    "layouts": f"{SHAPE} --ranks 4 --global 8 --device 8GiB",
    "interval": "--save 90s --mtbf 4h --simulate 100",
    "goodput": "--save 90s --every 20min --mtbf 4h --simulate 100",
    "preempt": "--chain torchrun --window 2s --save 10s",
    "batch": "--global 64 --micro 2 --ranks 8 --lose 3",
    "schedule": "--lr 1e-3 --warmup 10updates --total 100updates --global 8",
    "scaling": "--from 64 --to 128 --lr 0.1",
    "noise": "--small 4 --big 64 --norms 5.25 0.5625",
    "cost": "--params 125e6 --tokens 2.5e9",
    "recipe": "--objective sft",
}


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    shown = capsys.readouterr()
    return int(str(ended.value.code or 0)), shown.out, shown.err


def test_every_command_has_an_example_here() -> None:
    assert set(EXAMPLES) == set(COMMANDS)


@pytest.mark.parametrize("name", COMMANDS)
def test_json_is_the_only_thing_on_standard_output(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, name, *EXAMPLES[name].split(), "--json")
    document = json.loads(out)
    assert code == 0
    assert document["schema"] == f"samerun.plan.{name}.v1"


@pytest.mark.parametrize("name", COMMANDS)
def test_text_is_for_eyes(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, name, *EXAMPLES[name].split())
    assert code == 0
    assert out.strip()
    assert all(len(line) <= 130 for line in out.splitlines())


@pytest.mark.parametrize("name", COMMANDS)
def test_help_shows_an_example(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, name, "--help")
    assert code == 0
    assert f"examples:\n  samerun plan {name} --" in out or f"examples:\n  samerun plan {name} " in out


@pytest.mark.parametrize("name", COMMANDS)
def test_an_unknown_option_is_a_usage_error_with_an_example(name: str) -> None:
    with pytest.raises(UsageError, match=rf"for example: samerun plan {name}"):
        main([name, *EXAMPLES[name].split(), "--surprise"])


def test_a_misspelt_command_is_guessed() -> None:
    with pytest.raises(UsageError, match="did you mean 'memory'"):
        main(["memry"])


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("interval --save 90s --mtbf inf", "not a number with a unit"),
        ("interval --save 90s --mtbf 0s", "--mtbf 4h"),
        ("interval --save 90s --mtbf=-1h", "negative"),
        ("interval --save 90 --mtbf 4h", "has no unit"),
        ("interval --save 90s", "one way"),
        ("interval --save 90s --mtbf 4h --device-mtbf 4h", "one way"),
        ("interval --save 90s --device-mtbf 4h", "--devices"),
        ("interval --save 90s --failures 3/0h", "--failures"),
        ("interval --save 90s --failures many", "3 in 100h"),
        ("goodput --save 90s --mtbf 4h", "--every is missing"),
        ("preempt --window 1s --save 1s", "kill chain is empty"),
        ("batch --global 64 --micro 2 --tp 2", "need --ranks"),
        ("batch --global 64 --micro 2 --ranks 8 --ep 2", "State the number of replicas"),
        ("batch --global 64 --micro 2 --ranks 8 --lose 8", "leaves none"),
        ("batch --global 64 --micro 2 --replicas 2 --seq 8 --lengths x", "give one of them"),
        ("schedule --lr 1 --warmup 10updates --total 10samples --global 1", "same thing"),
        ("schedule --lr 1 --warmup 10s --total 10s --global 1", "same thing"),
        ("schedule --lr -1 --warmup 1updates --total 9updates --global 1", "--lr 3e-4"),
        ("scaling --from 64 --to 0 --lr 1", "positive whole number"),
        ("noise --small 4 --big 64", "one of the two"),
        ("noise missing.jsonl --small 4 --big 64", "cannot be read"),
        ("cost --params 1e9 --tokens 1e9 --mfu 40", "--mfu 0.4"),
        ("cost --params 1e9 --tokens 1e9 --device tpu9", "one of: a100"),
        ("cost --params 1e9 --tokens 1e9 --device a100 --peak 1e12", "give one of them"),
        ("recipe --base int4", "one of: fp32"),
        (f"layouts {SHAPE} --ranks 4 --global 8", "--device"),
        ("memory --params 1e9 --device 24Gib", "unknown unit"),
        ("memory --config a --layers 3", "give one of them"),
        ("memory --layers 3 --hidden 10 --heads 3 --vocab 7", "does not divide"),
    ],
)
def test_what_cannot_be_asked(line: str, said: str) -> None:
    with pytest.raises(UsageError) as refused:
        main(line.split())
    assert said in str(refused.value)


def test_negative_verdicts_end_with_3(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, "recipe", "--base", "nf4")[0] == 3
    assert run(capsys, "preempt", "--chain", "torchrun", "--window", "1s", "--save", "90s")[0] == 3
    assert run(capsys, "layouts", *SHAPE.split(), "--ranks", "1", "--global", "1", "--device", "1KiB")[0] == 3


def test_the_overview_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "--help")
    assert code == 0
    assert all(f"  {name}" in out for name in COMMANDS)
    assert run(capsys)[0] == 2


def test_the_typer_application_is_the_same_command() -> None:
    result = CliRunner().invoke(app, ["recipe", "--base", "nf4", "--json"])
    assert result.exit_code == 3
    assert json.loads(result.stdout)["verdict"] == "impossible"


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_loads_nothing_heavy(name: str) -> None:
    """Neither torch nor numpy, and not the typer stack either: that is what keeps the start quick."""
    script = (
        "import sys; from samerun.cli.main import main\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "heavy = {'torch', 'numpy', 'typer', 'rich', 'pydantic', 'asyncio'} & set(sys.modules)\n"
        "sys.stderr.write(repr(sorted(heavy)))"
    )
    ended = subprocess.run(
        [sys.executable, "-c", script, "plan", name, *EXAMPLES[name].split()],
        capture_output=True,
        text=True,
        check=True,
    )
    assert ended.stderr.endswith("[]")


def test_errors_reach_the_shell_with_code_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["samerun", "plan", "memory", "--params", "0"])
    with pytest.raises(SystemExit) as ended:
        entry.main()
    assert ended.value.code == 2
    assert capsys.readouterr().err.startswith("samerun: samerun plan memory: argument --params")
