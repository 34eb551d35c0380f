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


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("num_ranks", "named"), [(1, 2), (4, 4)])
def test_every_fault_in_the_example_is_named_and_the_run_stays_the_same(
    tmp_path: Path, num_ranks: int, named: int
) -> None:
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "{nproc}"] if num_ranks > 1 else []
    words = [sys.executable, *launcher, str(EXAMPLES / "train_gpt.py"), "{out}/run", "--updates", "60"]
    order = Order(
        scenario=Scenario.FAULTS,
        command=Command(words=words, nproc=num_ranks, environ={"OMP_NUM_THREADS": "1"}),
        wish=Wish(sizes=(num_ranks,)),
        when=When(),
    )
    judgement = drill(order, tmp_path, lambda name, done: None).judgement
    assert judgement.kind is Kind.SAME, judgement
    assert [one["named"] for one in judgement.diagnoses] == [True] * named
