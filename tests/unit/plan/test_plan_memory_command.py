"""The command as a stranger meets it: exit codes, figures, documents, refusals."""

from __future__ import annotations

import json

import pytest

from samerun.cli.plan import main
from samerun.errors import UsageError

QLORA = ["memory", "--params", "70e9", "--method", "qlora"]


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    return int(str(ended.value.code)), capsys.readouterr().out


def words(line: str) -> list[str]:
    return line.split()


def test_70b_at_4_bit_does_not_fit_24_gib(capsys: pytest.CaptureFixture[str]) -> None:
    """35e9 bytes are 32.6 GiB, 8.6 GiB more than 24: the base alone decides."""
    code, shown = run(capsys, *QLORA, "--device", "24GiB")
    assert code == 3
    assert "base weights (4 bit)             32.6 GiB" in shown
    assert "verdict: does not fit. The base weights (4 bit) alone, 32.6 GiB, exceed 24 GiB: short by 8.6 GiB." in shown


def test_70b_at_4_bit_on_48_gib_cannot_be_told_without_a_shape(capsys: pytest.CaptureFixture[str]) -> None:
    code, shown = run(capsys, *QLORA, "--device", "48GiB")
    assert code == 0
    assert "verdict: cannot tell. 15.4 GiB of 48 GiB are left" in shown
    said = " ".join(shown[shown.index("they must hold") :].split())
    for other in ("quantization constants", "higher-precision tensors", "adapter weights", "activations", "logits"):
        assert other in said


def test_with_a_shape_48_gib_gets_an_upper_bound(capsys: pytest.CaptureFixture[str]) -> None:
    shape = words("--layers 80 --hidden 8192 --heads 64 --kv-heads 8 --ffn 28672 --vocab 128256 --seq 512")
    lean = ["--recompute", "full", "--loss", "fused", "--optimizer", "adamw-8bit"]
    code, shown = run(capsys, "memory", *shape, "--method", "qlora", *lean, "--device", "48GiB")
    assert code == 0
    assert "unknown" not in shown
    assert "verdict: fits" in shown or "the upper bound" in shown


def test_json_is_one_document_with_a_schema_and_a_verdict(capsys: pytest.CaptureFixture[str]) -> None:
    code, shown = run(capsys, *QLORA, "--device", "24GiB", "--json")
    document = json.loads(shown)
    assert code == 3
    assert document["schema"] == "samerun.plan.memory.v1"
    assert document["verdict"] == "does not fit"
    assert document["terms"][0]["lower_bytes"] == 35_000_000_000
    assert document["short_bytes"] == 35_000_000_000 - 24 * 2**30
    assert document["suggestions"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--params", "70e9", "--device", "24"], "'24GiB' (2^30 bytes) or '24GB' (10^9 bytes)"),
        (["--params", "-5"], "write it like 70e9"),
        (["--params", "0"], "write it like 70e9"),
        (["--params", "nan"], "write it like 70e9"),
        (["--params", "inf"], "write it like 70e9"),
        (["--params", "1e9", "--device", "0GiB"], "--device 24GiB"),
        (["--params", "1e9", "--zero", "4"], "--zero 0, 1, 2 or 3"),
        (["--params", "1e9", "--ranks", "6", "--tp", "4"], "nearest mesh has 4 ranks"),
        (["--params", "1e9", "--method", "dora"], "one of: full, lora, qlora"),
        (["--params", "1e9", "--recompute", "every-0"], "--recompute every-4"),
        (["--params", "1e9", "--recompute", "some"], "none, selective, full, every-4, sqrt"),
        (["--params", "1e9", "--sp"], "--tp 2"),
        (["--layers", "32"], "--layers 32 --hidden 4096"),
        ([], "--params 70e9"),
        (["--params", "1e9", "--gpu", "1"], "for example: samerun plan memory"),
    ],
)
def test_what_cannot_be_asked_is_refused_with_the_right_way(arguments: list[str], said: str) -> None:
    with pytest.raises(UsageError) as refused:
        main(["memory", *arguments])
    assert said in str(refused.value)
    assert refused.value.exit_code == 2
