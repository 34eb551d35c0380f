"""The checkpoint commands on a real run: documents, exit codes, what they refuse; all of them without torch."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from samerun.checkpoint import Store
from samerun.cli import main as cli
from samerun.core.component import Captured
from samerun.core.progress import Progress, Updates, Windows
from samerun.ranks.threads import ThreadGroup, run_ranks


def save(path: Path, updates: list[int], *, size: int = 2, tag: str | None = None, nudge: float = 0.0) -> list[str]:
    saved: list[str] = []

    def body(group: ThreadGroup) -> None:
        store = Store(path, group=group, keep_last=50)
        store.write_run({"id": "r"})
        store.open_attempt({})
        for update in updates:
            weights = {
                "a": torch.full((7, 3), float(update) + nudge),
                "bf": torch.full((5,), 1.0, dtype=torch.bfloat16) + nudge,
            }
            state = {
                "weights": Captured(tensors=weights),
                "scheduler": Captured(plain={"step": update}),
                "rng": Captured(plain=group.rank, rank_tensors={"r": torch.tensor([group.rank])}),
            }
            progress = Progress(windows=Windows(update), updates=Updates(update))
            entry = store.save(state, progress, facts={"note": "x"}, tags=[tag] if tag else []).result()
            if group.rank == 0:
                saved.append(entry.name)

    run_ranks(size, body)
    return saved


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, Any]:
    """(exit code, the JSON document) of one command."""
    argv = sys.argv
    sys.argv = ["samerun", *map(str, arguments), "--json"]
    try:
        cli.main()
        code = 0
    except SystemExit as stop:
        code = int(stop.code or 0)
    finally:
        sys.argv = argv
    out = capsys.readouterr()
    return code, json.loads(out.out) if out.out else out.err


def flip(path: Path, name: str) -> None:
    shard = next((path / "checkpoints" / name).glob("*.safetensors"))
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)


def test_ls_and_show(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = save(tmp_path, [1, 2], tag="best")
    (tmp_path / "checkpoints" / "u000000009-00000000").mkdir()
    code, document = run(capsys, "ls", tmp_path)
    assert code == 0
    assert [c["name"] for c in document["checkpoints"]] == names[::-1]
    assert [c["tags"] for c in document["checkpoints"]] == [["best"], []]
    assert document["rejected"][0]["name"] == "u000000009-00000000"
    code, document = run(capsys, "show", f"{tmp_path}@{names[0][:12]}", "--tensors")
    assert (code, document["name"]) == (0, names[0])
    assert document["components"]["weights"]["listed"] == {"a": ["float32", [7, 3]], "bf": ["bfloat16", [5]]}
    assert document["components"]["rng"]["plain"] == "differ"
    assert document["facts"] == {"note": "x"}
    assert len(document["files"]) == 4


def test_why_takes_the_newest_sound_one_and_says_why_not_the_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = save(tmp_path, [1, 2, 3, 4])
    flip(tmp_path, names[3])
    (tmp_path / "checkpoints" / names[2] / "manifest.json").unlink()
    code, document = run(capsys, "why", tmp_path)
    assert (code, document["verdict"], document["taken"]) == (0, "resume", names[1])
    assert {d["name"]: d["decision"] for d in document["decisions"]} == dict(
        zip(names, ["older", "taken", "incomplete", "damaged"], strict=True)
    )
    assert "SHA-256" in document["decisions"][0]["reason"]
    for name in names[:2]:
        flip(tmp_path, name)
    code, document = run(capsys, "why", tmp_path)
    assert (code, document["verdict"]) == (3, "none usable")


def test_verify_reads_everything_and_counts_no_unfinished_save_as_damage(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = save(tmp_path, [1, 2])
    (tmp_path / "checkpoints" / "u000000009-00000000").mkdir()
    code, document = run(capsys, "verify", tmp_path)
    assert (code, document["verdict"], document["unfinished"]) == (0, "sound", ["u000000009-00000000"])
    flip(tmp_path, names[0])
    (tmp_path / "checkpoints" / names[1] / "stray").touch()
    code, document = run(capsys, "verify", tmp_path)
    assert (code, document["verdict"]) == (3, "damaged")
    problems = {c["name"]: c["problems"] for c in document["checkpoints"]}
    assert "SHA-256" in problems[names[0]][0]
    assert "does not name this file" in problems[names[1]][0]


def test_diff_says_which_tensors_and_how_far_on_any_number_of_ranks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save(tmp_path / "a", [1])
    save(tmp_path / "b", [1])
    save(tmp_path / "c", [1], nudge=2.0**-7)
    save(tmp_path / "d", [1], size=3)
    assert run(capsys, "diff", tmp_path / "a", tmp_path / "b")[1]["verdict"] == "same"
    code, document = run(capsys, "diff", tmp_path / "a", tmp_path / "c")
    assert code == 3
    found = {d["where"]: d for d in document["differences"]}
    assert set(found) == {"weights/a", "weights/bf"}
    assert (found["weights/a"]["different"], found["weights/a"]["max_ulps"]) == (21, 2**16)
    assert (found["weights/bf"]["different"], found["weights/bf"]["max_ulps"]) == (5, 1)
    code, document = run(capsys, "diff", tmp_path / "a", tmp_path / "d")
    assert [d["what"] for d in document["differences"]] == ["saved per rank, by 2 and 3 ranks; not compared"]
    save(tmp_path / "a", [2])
    code, document = run(capsys, "diff", tmp_path / "a", "@u000000001")
    assert {"progress.updates", "scheduler.step", "weights/a"} <= {d["where"] for d in document["differences"]}


def test_tag_and_prune(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = save(tmp_path, [1, 2, 3, 4, 5])
    assert run(capsys, "tag", f"{tmp_path}@{names[0]}", "paper")[0] == 0
    code, document = run(capsys, "prune", tmp_path, "--keep-last", 2, "--dry-run")
    assert (code, document["removed"], len(Store(tmp_path).catalog().entries)) == (0, names[1:3], 5)
    flip(tmp_path, names[4])
    flip(tmp_path, names[3])
    (tmp_path / "checkpoints" / "u000000009-00000000").mkdir()
    code, document = run(capsys, "prune", tmp_path, "--keep-last", 1)
    assert document["removed"] == [names[1], names[3]], "the newest sound one stays beside the newest"
    assert {e.name for e in Store(tmp_path).catalog().entries} == {names[0], names[2], names[4]}
    assert (tmp_path / "checkpoints" / "u000000009-00000000").exists()
    assert run(capsys, "prune", tmp_path, "--unfinished")[1]["unfinished"] == ["u000000009-00000000"]
    assert run(capsys, "tag", tmp_path, "paper", "--remove")[0] == 0
    assert Store(tmp_path).tags() == {}
    flip(tmp_path, names[0])
    flip(tmp_path, names[2])
    code, text = run(capsys, "prune", tmp_path, "--keep-last", 1)
    assert (code, "nothing is removed" in text) == (3, True)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["ls", "/nowhere/at/all"], "no such directory"),
        (["ls", "ftp://bucket/run"], "ftp:// is not known"),
        (["show", "{run}@zzz"], "no checkpoint or tag 'zzz'"),
        (["show", "{run}@u"], "fits 2 checkpoints"),
        (["tag", "{run}", "../x"], "is not allowed"),
        (["tag", "{run}", "none", "--remove"], "there is no tag"),
        (["diff", "{run}", "{empty}"], "holds no run"),
    ],
)
def test_what_cannot_be_meant_is_refused_with_what_to_write(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    save(tmp_path / "run", [1, 2])
    (tmp_path / "empty").mkdir()
    words = [word.format(run=tmp_path / "run", empty=tmp_path / "empty") for word in arguments]
    code, text = run(capsys, *words)
    assert code == 2
    assert message in text


@pytest.mark.parametrize("command", ["ls", "show", "why", "verify", "diff"])
def test_commands_load_without_torch(tmp_path: Path, command: str) -> None:
    save(tmp_path, [1, 2])
    arguments = [command, str(tmp_path), *(["@u000000001"] if command == "diff" else [])]
    script = (
        "import sys; from samerun.cli.main import main; sys.argv = ['samerun', *sys.argv[1:]]\n"
        "try: main()\nexcept SystemExit: pass\n"
        "assert 'torch' not in sys.modules, 'torch was loaded'"
    )
    subprocess.run([sys.executable, "-c", script, *arguments], check=True, capture_output=True, timeout=60)
