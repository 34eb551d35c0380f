from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from samerun.cli.main import build_app


def answer(*words: str) -> tuple[int, str]:
    done = CliRunner().invoke(build_app("canary"), ["canary", *words])
    return done.exit_code, done.stdout


def test_json_says_what_was_checked_and_how_much_it_can_see(tmp_path: Path) -> None:
    golden = tmp_path / "golden.json"
    for _ in range(2):
        code, out = answer("--json", "--golden", str(golden))
        document = json.loads(out)
        assert (code, document["schema"], document["verdict"]) == (0, "samerun.canary.v1", "pass")
    assert all(probe["had_golden"] for probe in document["probes"])
    assert "of 13.9% of runs" in document["power"]  # 1 − 0.05^(1/20)


def test_a_changed_golden_is_found_with_exit_code_3(tmp_path: Path) -> None:
    golden = tmp_path / "golden.json"
    answer("--golden", str(golden))
    document = json.loads(golden.read_text())
    (key,) = document["goldens"]
    document["goldens"][key]["gemm"] = "0" * 64
    golden.write_text(json.dumps(document))
    code, out = answer("--golden", str(golden))
    assert code == 3
    assert "gemm       corrupt" in out


@pytest.mark.parametrize("words", [["--dtype", "int3"], ["--repeat", "3"]])
def test_what_cannot_be_asked(words: list[str]) -> None:
    assert answer(*words)[0] == 2
