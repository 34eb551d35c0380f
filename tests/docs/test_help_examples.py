"""The example at the foot of each `--help` works as printed, in a folder that holds what it names."""

from __future__ import annotations

import json
import re
import shlex
import sys
from pathlib import Path

import pytest
import torch
import typer

import samerun.cli.main as cli
import samerun.cli.plan as plan
from samerun.checkpoint import Store
from samerun.core.component import Captured
from samerun.core.progress import Progress, Updates, Windows
from samerun.format import names

EXCUSED = {
    "samerun demo --break moments": "a training of a minute; `tests/e2e/test_same_run.py` has each control",
    "samerun drill -- python train.py --out {out}": "several trainings; `tests/e2e/test_drill_any_command.py`",
    "samerun launch --nproc 2 train.py --lr 3e-4": "starts torchrun; `tests/e2e/test_processes.py`",
    "samerun canary --device cuda:0 --golden canary.json": "needs that device; `test_health_canary_command.py`",
    "samerun doctor s3://bucket/runs": "needs that bucket; `tests/unit/cli/test_cli_doctor.py`",
    "samerun plan layouts --checkpoint runs/policy-sft --heads 32 --seq 4096 --ranks 5 --device 80GiB": "docs/plan.md",
    "samerun plan noise measurements.jsonl --small 16 --big 64": "`tests/unit/plan/test_plan_commands.py`",
    "samerun plan noise runs/sft": "`tests/unit/plan/test_plan_noise_of_a_run.py`",
}
"""Example → why it is not run here, and what runs it. Its options are parsed all the same."""

LLAMA = {
    "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256, "tie_word_embeddings": False,
    "max_position_embeddings": 8192,
}  # fmt: skip


def examples_of(name: str, capsys: pytest.CaptureFixture[str]) -> list[str]:
    if name != "plan":
        command = typer.main.get_command(cli.build_app(name)).commands[name]  # type: ignore[attr-defined]
        return re.findall(r"samerun .*", command.epilog or "")
    found = []
    for part in plan.COMMANDS:
        with pytest.raises(SystemExit):
            plan.main([part, "--help"])
        found += re.findall(r"^  (samerun plan .*)", capsys.readouterr().out, re.M)
    return found


def code_of(command: str, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(sys, "argv", shlex.split(command))
    try:
        cli.main()
    except SystemExit as ended:
        return int(ended.code or 0)
    return 0


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs, a foreign checkpoint and a model's configuration under the names that the examples use."""
    path = tmp_path_factory.mktemp("help")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(names.secrets, "token_hex", lambda _: "1f3a9c2e")
        for run, updates in (("policy-sft", 1840), ("a", 10), ("b", 10)):
            store = Store(path / "runs" / run)
            store.write_run({"id": run, "identity": {}})
            progress = Progress(windows=Windows(updates), updates=Updates(updates))
            weights = Captured(plain={"aliases": {}}, tensors={"w": torch.full((3,), 1.0)})
            store.save({"weights": weights}, progress, facts={}, tags=["best"]).result()
    (path / "ckpt").mkdir()
    torch.save({"model": {"w": torch.ones(3)}}, path / "ckpt" / "step-100")
    (path / "config.json").write_text(json.dumps(LLAMA))
    return path


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_the_example_of_a_command_works(
    name: str, place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(place)
    examples = examples_of(name, capsys)
    assert examples, f"{name} --help shows no example"
    for command in examples:
        if command not in EXCUSED:
            code = code_of(command, monkeypatch)
            assert code in (0, 3), f"$ {command}\n{capsys.readouterr()}"


def test_a_wrong_example_is_noticed(monkeypatch: pytest.MonkeyPatch, place: Path) -> None:
    monkeypatch.chdir(place)
    assert code_of("samerun ls runs/policy-sft --colour", monkeypatch) == 2
    assert code_of("samerun ls runs/nowhere", monkeypatch) == 2


def test_every_excuse_is_of_an_example_that_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    shown = {command for name in cli.COMMANDS for command in examples_of(name, capsys)}
    assert set(EXCUSED) - shown == set()
