"""The lessons and exercises run and say what they promise. Their figures are checked; broken controls must show."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest
import torch

EXAMPLES = Path(__file__).parents[2] / "examples"


def lesson(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_twenty_amp_steps_with_their_tags(capsys: pytest.CaptureFixture[str]) -> None:
    lesson("lesson_amp_step").main([])
    rows = [line.split() for line in capsys.readouterr().out.splitlines()[1:-1]]
    assert [row[1] for row in rows] == ["SKIP" if number in (7, 12) else "STEP" for number in range(20)]
    assert (rows[7][2], rows[12][2]) == ("non_finite_loss", "non_finite_grad")
    scales = [float(row[-1]) for row in rows]
    assert scales[8] == scales[7] == 65536.0, "a bad loss leaves the scale alone"
    assert scales[13] == scales[12] / 2 == 32768.0, "a bad gradient halves it"
    clipped = [float(row[6]) for row in rows if row[1] == "STEP"]
    assert max(clipped) <= 1.0


def test_the_accumulation_sweep(capsys: pytest.CaptureFixture[str]) -> None:
    lesson("lesson_accumulation").main(["--num-steps", "3", "--accum-grid", "1,2,4,8,16"])
    rows = [line.split() for line in capsys.readouterr().out.splitlines()[1:]]
    assert [int(row[0]) for row in rows] == [1, 2, 4, 8, 16]
    assert [int(row[1]) for row in rows] == [8, 16, 32, 64, 128]
    assert all(float(row[-1]) <= 1e-15 for row in rows), "float64: the order of additions"


def test_one_token_against_three(capsys: pytest.CaptureFixture[str]) -> None:
    module = lesson("exercise_token_mean")
    module.main()
    figures = [float(found) for found in re.findall(r"\d\.\d{4}", capsys.readouterr().out)]
    assert figures == [5.0, 3.5, 3.5, 3.5]


def test_the_first_adam_step_is_at_most_the_learning_rate() -> None:
    module = lesson("exercise_first_adam_step")
    module.main()
    for gradient in module.GRADIENTS:
        step = module.first_step(gradient)
        assert 0.98 * module.LEARNING_RATE < step <= module.LEARNING_RATE
        assert step == pytest.approx(module.by_formula(gradient), rel=1e-12)
    assert len(module.GRADIENTS) == 3


def test_what_sixteen_bits_hold(capsys: pytest.CaptureFixture[str]) -> None:
    module = lesson("lesson_amp_numbers")
    module.main()
    said = capsys.readouterr().out
    assert "smallest normal 6.1e-05, largest 65504" in said
    assert "16 bytes a parameter: 125M parameters take 2.0 GB" in said
    assert module.in_fp16(1e-8) == 0.0
    assert module.rescued(1e-8) == pytest.approx(1e-8, rel=1e-3)
    assert torch.finfo(torch.bfloat16).smallest_normal < 1.2e-38
    assert torch.finfo(torch.bfloat16).max > 3.3e38
    assert float(torch.tensor(65520.0).half()) == float("inf")
