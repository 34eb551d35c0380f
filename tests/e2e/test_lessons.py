"""The lessons and exercises run and say what they promise. Their figures are checked; broken controls must show."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from rank_pool import RankPool
from samerun import lessons
from samerun.errors import DamagedError, MismatchError, SchemaError, UnfinishedError
from samerun.plan.availability.deadline import Outcome

EXAMPLES = Path(__file__).parents[2] / "examples"


def lesson(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
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


def test_a_resume_in_the_middle_of_an_epoch(capsys: pytest.CaptureFixture[str]) -> None:
    found = lesson("lesson_resume").main(["--total-steps", "24", "--interrupt-at", "10"])
    assert found["everything"] == 0.0
    assert found["no random streams"] > 1e-4 < found["no Adam moments"], "the controls must be seen"
    assert "interrupted after step 10: epoch 1, batch 3 of 7" in capsys.readouterr().out


@pytest.mark.parametrize("words", [["--interrupt-at", "0"], ["--total-steps", "5"], ["--interrupt-at", "24"]])
def test_an_interruption_outside_the_run_is_a_usage_error(words: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        lesson("lesson_resume").main(words)
    assert ended.value.code == 2


def test_four_shards_reload_byte_equal_and_each_fault_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    module = lesson("lesson_sharded")
    module.main()
    said = capsys.readouterr().out
    assert said.count(".safetensors") >= 4 and "reload is byte-equal: True" in said
    states = [module.state_of(rank) for rank in range(4)]
    assert not module.same_bytes(states[0], states[1]), "the comparison can fail"
    lessons.save_sharded(states, tmp_path / "run", 10)
    errors = {fault: module.refusal(tmp_path / "run", fault) for fault in module.FAULTS}
    kinds = [MismatchError, DamagedError, DamagedError, DamagedError, SchemaError, UnfinishedError]
    assert [type(error) for error in errors.values()] == kinds
    assert len({str(error).split(":")[-1] for error in errors.values()}) == len(errors)
    assert lessons.load_sharded(tmp_path / "run", 4)[0].world_size == 4, "the original was left alone"


@pytest.mark.timeout(180)
def test_four_ranks_resume_and_the_control_is_noticed(ranks: RankPool, tmp_path: Path) -> None:
    for sound, control in ranks.run(4, "lesson_jobs:four_ranks", folder=str(tmp_path), timeout_seconds=150):
        assert sound == {"sample ids": True, "losses": True, "parameters and moments": True}
        assert control == {"sample ids": True, "losses": False, "parameters and moments": False}


@pytest.mark.soak
@pytest.mark.parametrize(
    ("words", "last", "code"), [([], "RESUME VERIFIED", 0), (["--forget", "moments"], "RESUME NOT VERIFIED", 3)]
)
def test_four_ranks_as_a_command(words: list[str], last: str, code: int) -> None:
    command = [sys.executable, str(EXAMPLES / "lesson_four_ranks.py"), *words]
    end = subprocess.run(command, capture_output=True, text=True, timeout=110, check=False)
    assert (end.returncode, end.stdout.splitlines()[-1]) == (code, last), end.stderr


def test_scalar_adam_resumed_through_json() -> None:
    module = lesson("exercise_adam_resume")
    found = module.resumes()
    twin = found.pop("never stopped")
    assert found.pop("everything") == twin, "bitwise: JSON gives every float back"
    assert all(state != twin for state in found.values())
    assert found["moments lost"].lr == twin.lr, "keeping the step counter does not bring moments back"
    assert found["cursor lost"].consumed != twin.consumed
    assert module.Adam.from_json(twin.to_json()) == twin


def test_scalar_adam_is_torchs() -> None:
    module = lesson("exercise_adam_resume")
    weight = torch.zeros((), dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.Adam([weight], lr=1.0, betas=(module.BETA1, module.BETA2), eps=module.EPSILON)
    state = module.Adam()
    for _ in range(10):
        optimizer.param_groups[0]["lr"] = state.lr
        weight.grad = weight.detach() - module.TARGETS[state.consumed % len(module.TARGETS)]
        optimizer.step()
        state = state.after_one()
        assert state.w == pytest.approx(float(weight.detach()), rel=1e-12)  # another order of the same operations


def test_the_preemption_budget() -> None:
    module = lesson("exercise_preemption_budget")
    assert module.budget(112, window=12, save=90, margin=10).verdict is Outcome.FITS, "equal is enough"
    assert module.budget(111, window=12, save=90, margin=10).verdict is Outcome.DROP_WINDOW
    assert module.budget(99, window=12, save=90, margin=10).verdict is Outcome.DOES_NOT_FIT
    assert module.budget(90, window=1, save=90, margin=1).short_seconds == 2
    assert [f"{module.saving_share(minutes * 60, 90):.1%}" for minutes in (5, 20)] == ["23.1%", "7.0%"]
    assert (module.finished().update, module.finished().samples) == (1841, 117_824)
    assert (module.dropped().update, module.dropped().samples) == (1840, 117_760)
    assert module.finished().is_one_boundary and module.dropped().is_one_boundary
    assert not any(module.mixed(done).is_one_boundary for done in range(1, 8))


@pytest.mark.parametrize("length", [1, 7, 13, 26, 64])
@pytest.mark.parametrize(("before", "after"), [(4, 8), (8, 4), (3, 5), (4, 1)])
def test_slices_cut_anew_hold_the_same_numbers(length: int, before: int, after: int) -> None:
    module = lesson("exercise_reshard")
    found = module.reshard(module.cut(range(length), before), after, length=length)
    assert [value for _, values in found for value in values] == list(range(length))
    assert found == module.cut(range(length), after)


def test_gaps_and_overlaps_are_rejected() -> None:
    module = lesson("exercise_reshard")
    sources = module.cut(range(module.LENGTH), 4)
    wrong = module.broken(sources)
    assert len(wrong) == 5
    for slices in wrong.values():
        with pytest.raises(DamagedError):
            module.reshard(slices, 8, length=module.LENGTH)
