"""The two scripts that know nothing of samerun, drilled as they are: docs/drills.md states these verdicts."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

from samerun.drill.drilling import Order, drill
from samerun.drill.inside.scenarios import Scenario, Wish
from samerun.drill.judgement import Judgement, Kind
from samerun.drill.outside.triggers import When
from samerun.drill.starting import Command

EXAMPLES = Path(__file__).parents[2] / "examples"


def drilled(place: Path, script: str, patterns: tuple[str, ...], log: str | None) -> Judgement:
    order = Order(
        scenario=Scenario.CONTINUITY,
        command=Command(words=[sys.executable, str(EXAMPLES / script), "{out}"]),
        wish=Wish(),
        when=When(patterns=patterns),
        log=Path(log) if log else None,
    )
    return drill(order, place, lambda name, done: None).judgement


@pytest.mark.soak
def test_the_plain_script_sees_other_samples_after_its_first_resume(tmp_path: Path) -> None:
    judgement = drilled(tmp_path, "drill_plain_torch_save.py", ("step 210 ",), "steps.jsonl")
    assert judgement.kind is Kind.WRONG, judgement
    first = judgement.components["samples"]
    assert first is not None and first.update == 201
    assert judgement.suspected == ["rng", "cursor"]


@pytest.mark.soak
@pytest.mark.skipif(
    not (importlib.util.find_spec("transformers") and importlib.util.find_spec("accelerate")),
    reason="transformers and accelerate are not installed (pip install 'samerun[hf]')",
)
def test_the_hugging_face_script_is_the_same_between_saves(tmp_path: Path) -> None:
    assert drilled(tmp_path, "drill_hf_trainer.py", ("saved step 4$", "saved step 12"), None).kind is Kind.SAME
