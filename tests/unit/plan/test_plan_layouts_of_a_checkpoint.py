"""`samerun plan layouts --checkpoint`: the layouts of the shape that the weights have, read without torch."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from plan_named_decoder import SHAPE, make_run
from samerun.cli.plan import main
from samerun.errors import UsageError

BY_HAND = ["--layers", "3", "--hidden", "64", "--heads", "4", "--kv-heads", "2", "--ffn", "160", "--vocab", "97"]
REST = ["--seq", "32", "--device", "80GiB", "--json"]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("plan") / "run"
    make_run(path)
    return path


def layouts(capsys: pytest.CaptureFixture[str], *arguments: str) -> Any:
    with pytest.raises(SystemExit) as ended:
        main(["layouts", *arguments])
    assert ended.value.code == 0
    return json.loads(capsys.readouterr().out)


def test_a_checkpoint_is_as_good_as_its_shape(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    read = layouts(capsys, "--checkpoint", str(run), "--heads", "4", "--ranks", "4", *REST)
    by_hand = layouts(capsys, *BY_HAND, "--ranks", "4", "--global", "8", *REST)
    saved = read.pop("checkpoint")
    assert read == by_hand
    assert (saved["num_ranks"], saved["num_replicas"], saved["global_batch"]) == (1, 1, 8)
    assert saved["num_tensors"] == 3 + 9 * SHAPE.num_layers


def test_ranks_and_batch_are_those_of_the_run_unless_said(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    as_written = layouts(capsys, "--checkpoint", str(run), "--heads", "4", *REST)
    assert (as_written["num_ranks"], as_written["global_batch"]) == (1, 8)
    other = layouts(capsys, "--checkpoint", str(run), "--heads", "4", "--ranks", "3", "--global", "9", *REST)
    assert (other["num_ranks"], other["global_batch"]) == (3, 9)


def test_one_checkpoint_by_its_name_or_its_directory(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name = sorted((run / "checkpoints").iterdir())[0].name
    named = layouts(capsys, "--checkpoint", f"{run}@{name}", "--heads", "4", *REST)
    assert named["checkpoint"]["name"] == name
    alone = ["--checkpoint", str(run / "checkpoints" / name), "--heads", "4"]
    with pytest.raises(UsageError, match=r"--global is missing, and .* does not say it"):
        main(["layouts", *alone, *REST])
    assert layouts(capsys, *alone, "--global", "8", *REST)["choices"] == named["choices"]


def test_a_shape_by_hand_must_agree_with_the_weights(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    agreed = layouts(capsys, "--checkpoint", str(run), *BY_HAND, *REST)
    assert agreed["choices"]
    with pytest.raises(UsageError, match=r"--checkpoint .* and the shape disagree"):
        main(["layouts", "--checkpoint", str(run), *BY_HAND, "--ffn", "320", *REST])


def test_what_cannot_be_read(run: Path, tmp_path: Path) -> None:
    for arguments, said in (
        (["--checkpoint", str(run)], "add --heads"),
        (["--checkpoint", str(tmp_path / "none"), "--heads", "4"], "no such directory"),
        (["--checkpoint", f"{run}@u9", "--heads", "4"], "no checkpoint or tag"),
        (["--checkpoint", str(tmp_path), "--heads", "4"], "holds no run"),
        ([*BY_HAND, "--global", "8"], "--ranks is missing"),
        ([*BY_HAND, "--ranks", "8"], "--global is missing"),
    ):
        with pytest.raises(UsageError, match=said):
            main(["layouts", *arguments, *REST])


def test_reading_a_checkpoint_loads_nothing_heavy(run: Path) -> None:
    script = (
        "import sys; from samerun.cli.main import main\n"
        "try: main()\n"
        "except SystemExit as ended: assert not ended.code, ended.code\n"
        "assert not {'torch', 'numpy', 'typer', 'rich', 'pydantic', 'asyncio'} & set(sys.modules)"
    )
    arguments = ["plan", "layouts", "--checkpoint", str(run), "--heads", "4", *REST]
    subprocess.run([sys.executable, "-c", script, *arguments], check=True, capture_output=True)
